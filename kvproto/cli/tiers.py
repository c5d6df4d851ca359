"""`kvproto tiers PLACE` and `kvproto find ADDRESS ...` (drafts): stored pages, and who has most of a prompt's cache."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import printable
from kvproto.finder import Finder
from kvproto.options import Options
from kvproto.tiers.fsck import GRACE, StoreReport, check_store, delete_page, prune
from kvproto.tiers.manifest import manifest_key
from kvproto.tiers.store import open_store
from kvproto.wire.messages import Manifest
from kvproto.wire.plain import read_file

_LEAST = 8
"""The fewest digits that name a namespace to delete."""


def add(commands: Any) -> None:
    command = commands.add_parser("tiers", help="list stored pages; verify them, prune them")
    command.add_argument("place", metavar="PLACE", help="a folder, packs:FOLDER or s3://BUCKET/PREFIX")
    command.add_argument("--verify", action="store_true", help="read every byte and compare it with its digest")
    text = "delete damaged pages, and old files that belong to no page"
    command.add_argument("--prune", action="store_true", help=text)
    text = "how old those files must be, as their writer may still be at work (default %(default).0f)"
    command.add_argument("--grace", type=float, default=GRACE, metavar="SECONDS", help=text)
    command.add_argument("--drop", metavar="HEX", help="delete all pages of the namespace whose name begins with HEX")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_tiers)
    command = commands.add_parser("find", help="say which source engines have most of a prompt's cache")
    command.add_argument(
        "sources", metavar="ADDRESS[=KEY]", nargs="+", help="address of any one rank of each source, and its public key"
    )
    command.add_argument(
        "--tokens", metavar="FILE", help="token ids of the prompt, separated by blanks or commas; - for standard input"
    )
    command.add_argument("--name", help="name of this router in allow-lists (default: a unique one)")
    command.add_argument("--keys", metavar="DIR", help="folder with this router's CURVE keys, made by `kvproto keygen`")
    command.add_argument("--insecure", action="store_true", help="allow TCP without keys")
    command.add_argument(
        "--wait",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for all of them (default %(default).0f)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_find)


def _tiers(args: argparse.Namespace) -> int:
    """Check a store, delete what was requested, and print; exits with 1 for damaged pages or an unreadable place."""
    scheme, _, rest = args.place.rpartition(":")
    wants = {"": Path(rest) / "m", "packs": Path(rest) / "p"}.get(scheme)
    if wants is not None and not wants.exists():
        raise ValueError(f"{args.place}: no cached pages, since there is no {wants}")
    store = open_store(args.place)
    report, deleted = check_store(store, args.verify), dict[str, int]()
    if args.drop is not None:
        spaces = {page.namespace.hex() for page in report.pages if page.namespace.hex().startswith(args.drop)}
        if len(spaces) != 1 or len(args.drop) < _LEAST:
            says = f"{len(spaces)} namespaces begin with {args.drop!r}: name one, by {_LEAST} digits at least"
            raise ValueError(says)
        dropped = [page for page in report.pages if page.namespace.hex() in spaces]
        for page in dropped:
            delete_page(store, manifest_key(page.id, page.geometry), page)
        deleted["dropped"] = len(dropped)
    if args.prune:
        deleted["damaged"], deleted["files"] = prune(store, report, args.grace, args.verify)
    if deleted:
        report = check_store(store, args.verify)
    print(json.dumps(_as_json(report) | {"deleted": deleted}) if args.json else "\n".join(_lines(report, deleted)))
    return 1 if report.damaged else 0


def _by_kind(report: StoreReport) -> list[tuple[tuple[str, str], list[Manifest]]]:
    """Pages by namespace and geometry."""
    kinds: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
    for page in report.pages:
        kinds[page.namespace.hex(), page.geometry.hex()].append(page)
    return sorted(kinds.items())


def _size(pages: list[Manifest]) -> int:
    return sum(component.length for page in pages for component in page.components)


def _groups(pages: list[Manifest]) -> dict[int, tuple[str, int, int]]:
    """The rule of each component, how many pages have it, and its bytes in total."""
    totals: dict[int, tuple[str, int, int]] = {}
    for page in pages:
        for c in page.components:
            reach = "" if c.reach is None else f" of {c.reach} tokens"
            _, count, size = totals.get(c.group, ("", 0, 0))
            totals[c.group] = f"{c.form.name} {c.rule.name}{reach}", count + 1, size + c.length
    return dict(sorted(totals.items()))


def _lines(report: StoreReport, deleted: dict[str, int]) -> Iterator[str]:
    for (space, geometry), pages in _by_kind(report):
        yield f"namespace {space[:16]}, geometry {geometry[:16]}"
        yield f"  {len(pages):,} pages of {pages[0].page} tokens, {_size(pages):,} bytes"
        for group, (says, count, size) in _groups(pages).items():
            yield f"  group {group}: {says}, in {count:,} pages, {size:,} bytes"
    if not report.pages:
        yield "no page"
    for page in report.damaged:
        yield f"damaged {page.key!r}: {page.why}"
    if report.newer:
        yield f"{len(report.newer):,} pages of a later version, left alone"
    for name, files in (("that no page names", report.orphans), ("that were not finished", report.unfinished)):
        if files:
            yield f"{len(files):,} files {name}, {sum(files.values()):,} bytes"
    for what, count in deleted.items():
        yield f"deleted: {count:,} {({'dropped': 'pages', 'damaged': 'damaged pages', 'files': 'files'})[what]}"


def _as_json(report: StoreReport) -> dict[str, Any]:
    kinds = [
        {
            "namespace": space,
            "geometry": geometry,
            "page_tokens": pages[0].page,
            "pages": len(pages),
            "bytes": _size(pages),
            "groups": {
                group: {"counts": says, "pages": count, "bytes": size}
                for group, (says, count, size) in _groups(pages).items()
            },
        }
        for (space, geometry), pages in _by_kind(report)
    ]
    damaged = [{"key": page.key, "why": page.why} for page in report.damaged]
    rest = {"orphans": report.orphans, "unfinished": report.unfinished, "newer": report.newer}
    return {"kinds": kinds, "damaged": damaged, **rest}


def _find(args: argparse.Namespace) -> int:
    """Print what engines hold, the longest first; exits with 1 on errors, and with 3 if an engine did not answer."""
    text = "" if args.tokens is None else read_file(args.tokens).decode()
    tokens = [int(token) for token in text.replace(",", " ").split()]
    sources = {address: key or None for address, _, key in (source.partition("=") for source in args.sources)}
    with Finder(sources, args.name, Options(keys=args.keys, insecure=args.insecure)) as finder:
        finder.wait(args.wait)
        engines, unknown = finder.find(tokens), finder.why()
    if args.json:
        print(json.dumps({"found": [attrs.asdict(held) for held in engines], "unknown": unknown}))
    else:
        for held in engines:
            of = f"{held.tokens:,} of {len(tokens):,} tokens, {held.device:,} on the device; " if tokens else ""
            name = printable(held.engine)
            print(f"{name} replica {held.replica} at {held.address}: {of}{held.pages:,} pages in all")
        for address, why in unknown.items():
            print(f"{address}: {why}")
    return 3 if unknown else 0
