"""Pages that ranks of other sizes, deals and page sizes wrote, cut as a plan says.

A writer keeps what it owns as `g/<geometry>.<page>` beside its pages. A reader takes such records for the ranks of an
engine, plans from them to itself as for a transfer, and runs the copy program from objects to pages of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import lcm

import attrs
import numpy as np

from kvproto.copying.execute import execute
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.errors import U32, KvprotoError, PlanError, check_whole
from kvproto.planning.geometry import Geometry, decode_geometry, encode_geometry
from kvproto.planning.plan import Route, plan
from kvproto.tiers.host_copies import as_pool
from kvproto.tiers.manifest import ObjectReferences, manifest_key, object_key
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout, alone, components
from kvproto.tiers.store import Store, manifest_at
from kvproto.wire.enums import KeyForm, LengthRule
from kvproto.wire.messages import Manifest

__all__ = ["RelayoutReader", "geometry_key"]

FRESH = 5.0
"""Seconds for which a look at the records is good."""

Pages = list[dict[int, bytes]]


def geometry_key(geometry: bytes, page: int) -> str:
    """Under which what a writer owns is stored."""
    return f"g/{geometry.hex()}.{page}"


@attrs.define
class _WriterEngine:
    """Ranks that can be of one engine: their groups do not contradict each other."""

    page: int
    geometry: Geometry
    digests: list[bytes]
    """Of the ranks, by number."""

    def joins(self, page: int, one: Geometry, digest: bytes) -> bool:
        """Whether a rank was taken in."""
        ours = {group.id: group for group in self.geometry.groups}
        theirs = {group.id: group for group in one.groups}
        rest = attrs.evolve(one, groups=self.geometry.groups, ranks=self.geometry.ranks)
        if (
            page != self.page
            or rest != self.geometry
            or any(ours.get(id, group) != group for id, group in theirs.items())
        ):
            return False
        groups = tuple(group for _, group in sorted((ours | theirs).items()))
        ranks = (*self.geometry.ranks, attrs.evolve(one.ranks[0], rank=len(self.digests)))
        self.geometry = attrs.evolve(self.geometry, groups=groups, ranks=ranks)
        self.digests.append(digest)
        return True


class RelayoutReader:
    """The pages of all other geometries in a store, for one rank. Any thread may read."""

    def __init__(self, store: Store, geometry: Geometry, rank: int, layout: PageLayout) -> None:
        """`geometry` is our engine's Description, `layout` what our pages are made of."""
        self.store, self.layout = store, layout
        self.own = alone(geometry, rank, [part.group for part in layout.parts])
        self._engines: list[_WriterEngine] = []
        self._seen = -FRESH

    def publish_geometry(self) -> None:
        """Keep what we own where our pages are; raises OSError."""
        self.store.put(geometry_key(self.layout.geometry, self.layout.page), encode_geometry(self.own))

    def read(self, chain: Chain, first: int) -> Pages:
        """Pages of a prompt from `first` on, as many as others have, by group; raises OSError."""
        best: Pages = []
        for engine in self._look():
            with suppress(KvprotoError):  # what does not fit together, or not to us
                best = max(best, self._of(engine, chain, first), key=len)
        return best

    def _look(self) -> list[_WriterEngine]:
        if time.monotonic() - self._seen > FRESH:
            engines: list[_WriterEngine] = []
            for key in sorted(self.store.keys("g")):
                digest, _, page = key[2:].partition(".")
                data = self.store.get(key)
                if digest == self.layout.geometry.hex() or data is None or hashlib.sha256(data).hexdigest() != digest:
                    continue
                with suppress(KvprotoError, ValueError):
                    one, tokens = decode_geometry(data), check_whole("page", int(page), 1, U32)
                    if one != alone(one, 0, [group.id for group in one.groups]):
                        continue
                    if not any(engine.joins(tokens, one, bytes.fromhex(digest)) for engine in engines):
                        engines.append(_WriterEngine(tokens, one, [bytes.fromhex(digest)]))
            self._engines, self._seen = engines, time.monotonic()
        return self._engines

    def _of(self, engine: _WriterEngine, chain: Chain, first: int) -> Pages:
        """What one engine has; raises PlanError where its ranks and ours have no plan."""
        mine, theirs = self.layout.page, engine.page
        base = first * mine // lcm(mine, theirs) * lcm(mine, theirs)  # where a page of both begins
        prompt = chain if theirs == mine else chain.of(theirs)
        begin = base // theirs
        found = {rank: self._manifests(engine, rank, prompt, begin) for rank in range(len(engine.digests))}
        for count in sorted({len(some) for some in found.values()} - {0}, reverse=True):
            with suppress(PlanError):  # those that have so many pages do not own all of ours
                there = tuple(one for one in engine.geometry.ranks if len(found[one.rank]) >= count)
                routes = plan(attrs.evolve(engine.geometry, ranks=there), self.own).routes
                break
        else:
            return []
        tokens = min(base + count * theirs, len(chain.ids(self.layout.form)) * mine) - base
        pages = tokens // mine
        if pages <= 0 or base // mine + pages <= first:
            return []
        count = -(-pages * mine // theirs)
        made = {part.group: memoryview(bytearray(part.length * pages)) for part in self.layout.parts}
        cut = _Cut(self, engine, routes, found)
        rules = {part.group: part.rule for part in self.layout.parts}
        must = {group for group, rule in rules.items() if rule is LengthRule.PREFIX}
        if not cut.run(must, range(count), Window(0, pages * mine, np.arange(pages)), made):
            return []
        lacks: dict[int, set[int]] = {i: set() for i in range(pages)}
        for group in (group for group, rule in rules.items() if rule is LengthRule.WINDOW):
            since = cut.since(group, range(count), lcm(mine, theirs) // theirs)
            begins = min(since * theirs // mine, pages)
            window = Window(0, (pages - begins) * mine, np.arange(begins, pages))
            if begins == pages or not cut.run({group}, range(since, count), window, made):
                begins = pages
            for i in range(begins):
                lacks[i].add(group)
        states = {group for group, rule in rules.items() if rule is LengthRule.STATE}
        for i in range(pages):  # a state is after the last token of a page, which may be in the middle of one of theirs
            at, middle = divmod((i + 1) * mine, theirs)
            for group in states:
                window = Window(0, (i + 1) * mine, np.array([i]))
                if middle or not cut.run({group}, range(at - 1, at), window, made):
                    lacks[i].add(group)
        return [
            {
                part.group: bytes(made[part.group][i * part.length : (i + 1) * part.length])
                for part in self.layout.parts
                if part.group not in lacks[i]
            }
            for i in range(first - base // mine, pages)
        ]

    def _manifests(self, engine: _WriterEngine, rank: int, chain: Chain, begin: int) -> list[Manifest]:
        """Those of a rank's pages from `begin` on, up to the first that is not there or not as it should be."""
        found: list[Manifest] = []
        for i in range(begin, len(chain.own)):
            for form in (KeyForm.AHEAD, KeyForm.OWN):
                if i >= len(chain.ids(form)):
                    continue
                key = manifest_key(chain.ids(form)[i], engine.digests[rank])
                manifest = ObjectReferences().add(key, manifest_at(self.store, key))
                if manifest is not None and _right(manifest, form, chain, i):
                    found.append(manifest)
                    break
            else:
                return found
        return found


@attrs.frozen
class _Cut:
    """Copies from the objects of an engine's pages, as routes say."""

    ours: RelayoutReader
    engine: _WriterEngine
    routes: Sequence[Route]
    found: Mapping[int, Sequence[Manifest]]
    """Of their ranks, the pages that are there."""

    def run(self, groups: Collection[int], pages: range, want: Window, made: Mapping[int, memoryview]) -> bool:
        """Fill some of our groups from some of their pages; whether all objects were there whole (KVP-TIER-CHECK)."""
        layout, routes = self.ours.layout, [route for route in self.routes if route.group in groups]
        lengths = {part.group: part.length for part in layout.parts}
        for rank in sorted({route.source for route in routes}):
            some = tuple(route for route in routes if route.source == rank)
            manifests = self.found[rank][pages.start : pages.stop]
            parts = components(self.engine.geometry, rank, self.engine.page)
            theirs = {box.source_group for route in some for box in route.boxes}
            if not self._alike(some, manifests[0]):
                return False
            memory = self._memory(parts, manifests, theirs)
            if memory is None:
                return False
            source = as_pool(
                RankLayout(self.engine.geometry, rank, {}),
                {part.group: part.length for part in parts.parts if part.group in theirs},
                len(pages),
            )
            sink = as_pool(
                RankLayout(self.ours.own, 0, {}), lengths, made[routes[0].group].nbytes // lengths[routes[0].group]
            )
            have = Window(0, len(pages) * self.engine.page, np.arange(len(pages)))
            program = Pair(some, source, sink).lower(dict.fromkeys(theirs, have), dict.fromkeys(groups, want))
            execute(program, memory, made)
        return True

    def since(self, group: int, pages: range, step: int) -> int:
        """From which of their pages on all have what our group comes from, where a page of both lengths begins."""
        theirs = {
            (route.source, box.source_group) for route in self.routes if route.group == group for box in route.boxes
        }
        since = 0
        for i in pages:
            held = {(rank, c.group) for rank, _ in theirs for c in self.found[rank][i].components}
            since = since if theirs <= held else i + 1
        return -(-since // step) * step

    def _alike(self, routes: Sequence[Route], manifest: Manifest) -> bool:
        """Whether what a page has counts as ours does (KVP-TIER-PARTS)."""
        stated = {c.group: (c.form, c.rule, c.reach) for c in manifest.components}
        pairs = {(route.group, box.source_group) for route in routes for box in route.boxes}
        ours = {part.group: (part.form, part.rule, part.reach) for part in self.ours.layout.parts}
        return all(stated.get(there) == ours[here] for here, there in pairs)

    def _memory(
        self, layout: PageLayout, manifests: Sequence[Manifest], groups: Collection[int]
    ) -> Mapping[int, memoryview] | None:
        """The objects of a rank's pages, one after the other; None where one is not whole."""
        made = {}
        for group in groups:
            length = layout.part(group).length
            objects = [*self._objects(manifests, group, length)]
            if any(data is None for data in objects):
                return None
            made[group] = memoryview(bytearray(b"".join(data for data in objects if data is not None)))
        return made

    def _objects(self, manifests: Sequence[Manifest], group: int, length: int) -> Iterator[bytes | None]:
        for manifest in manifests:
            component = next((c for c in manifest.components if c.group == group), None)
            data = None if component is None else self.ours.store.get(object_key(manifest, component))
            whole = component and data and len(data) == length and hashlib.sha256(data).digest() == component.digest
            yield data if whole else None


def _right(manifest: Manifest, form: KeyForm, chain: Chain, i: int) -> bool:
    ahead = any(component.form is KeyForm.AHEAD for component in manifest.components)
    asked = (form, chain.own[i], chain.previous(i), chain.space, chain.page)
    stated = (manifest.form, manifest.own, manifest.previous, manifest.namespace, manifest.page)
    return stated == asked and (form is KeyForm.AHEAD or not ahead)  # it may lack the component that looks ahead
