"""Tokens that a step of decode gives with the draft's cache handed over, computed again, and cold.

`python benchmarks/acceptance.py [TARGET ...] [--prompts N] [--out] [--quick]`, or `make acceptance`: a prefill and a decode engine of the demo, in
processes of their own, greedily continue prompts of several lengths. Small models of one architecture draft for another,
on the text that they were trained on and on one that they have never seen (the licence of this repository), and the two
engines differ in TP, or in the number of their replicas, if these share the experts of the target (DP attention). Heads that were trained on what their own targets write (`distill.py`) draft for these on texts that
they have not seen: a story, a page of documentation (`texts/page.txt`, this repository's README of one day, which stays as it was), a licence. Each request is compared with one undivided engine that
begins alike: its tokens, and how many proposals of the draft it accepts. --out keeps what each target gave.

    handed over   prefill computes the draft's rows, and they move with the target's
    computed      prefill has no draft: decode runs its own over the prompt (`--cold-draft compute`), which a head cannot
    cold          prefill has no draft: the rows of the prompt are zero (`--cold-draft zero`)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from harness import ROOT, arguments, facts, keep

from kvproto_reference import smollm2
from kvproto_reference.data import load_text

PAIRS = [(target, draft) for target in ("mla", "gqa") for draft in ("gqa", "mla", "eagle")]
"""Architectures of target and draft; `eagle` is a head that reads the target's hidden states."""
EXPERTS = [("moe", "gqa"), ("moe", "eagle")]
"""A target with experts, and its drafts."""
DISTILLED = [(target, draft) for target in ("small", "smollm2") for draft in ("eagle", "mtp")]
"""Targets with heads that were trained on a GPU."""
TARGETS = tuple(dict.fromkeys(target for target, _ in (*PAIRS, *EXPERTS, *DISTILLED)))
WAYS = {"handed over": (), "computed": ("--cold-draft", "compute"), "cold": ("--cold-draft", "zero")}
TP = [(2, 1), (1, 2), (4, 2)]
"""TP ranks of prefill and of decode."""
DP = {"DP 4 to DP 2": "--prefill-tp 1 --prefill-dp 4 --decode-dp 2", "TP 2 to DP 4": "--prefill-tp 2 --decode-dp 4"}
"""Replicas that share experts, as a demo's options."""
PAGE = "benchmarks/texts/page.txt"
LENGTHS = (24, 96, 320)
"""Tokens of a prompt; SmolLM2 has some four bytes in one."""
BYTES_A_TOKEN = {"smollm2": 4}
PROMPTS = {"smollm2": 3}
"""Prompts of a kind, where they are not 12."""
PROPOSED, NEW = 4, 48
"""Tokens that a draft proposes at a time, and that each request generates."""


def texts(target: str) -> dict[str, str]:
    """The texts that a target continues, without the blank lines that separate prompts."""
    story, licence, page = load_text(), *(ROOT.joinpath(name).read_text() for name in ("LICENSE", PAGE))
    if target in ("mla", "gqa", "moe"):
        return {"trained on": _joined(story), "never seen": _joined(licence)}
    return {"story": _joined(story), "page": _joined(page), "licence": _joined(licence)}


def _joined(text: str) -> str:
    return "\n".join(words for line in text.splitlines() if (words := line.strip()))


def prompts(target: str, count: int) -> Iterator[tuple[str, int, str]]:
    """The text, length and words of each prompt: `count` of a kind, evenly spread over their text."""
    for name, text in texts(target).items():
        for length in LENGTHS:
            size = length * BYTES_A_TOKEN.get(target, 1)
            for n in range(count):
                start = n * (len(text) - size) // count
                yield name, length, text[start : start + size].strip("\n")


def counted(asked: list[tuple[str, int, str]], args: list[str]) -> dict[str, Any]:
    """Counts of a demo by text and length, of all requests and tokens and steps of each; raises RuntimeError if it differs from one undivided engine."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n\n".join(words for _, _, words in asked))
        file.flush()
        sizes = ["--max-new", str(NEW), "--speculate", str(PROPOSED), "--pages", str(40 * len(asked))]
        command = [sys.executable, "-m", "kvproto_reference.demo", "--json", "--prompt-file", file.name, *sizes, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)}: status {done.returncode}\n{done.stderr or done.stdout}")
    told = json.loads(done.stdout)
    found: dict[str, Any] = {}
    for (text, length, _), request in zip(asked, told["requests"], strict=True):
        of = found.setdefault(text, {}).setdefault(str(length), dict.fromkeys(_COUNTS, 0) | {"each": []})
        of["each"].append([request["decoded"], request["steps"]])
        for name in _COUNTS:
            of[name] += request[name]
    return found


_COUNTS = ("steps", "decoded", "proposed", "accepted")


def shown(found: dict[str, Any]) -> str:
    """Tokens a step and the share of proposals that were accepted, by text and length."""
    cells = (of for lengths in found.values() for of in lengths.values())
    return "  ".join(f"{of['decoded'] / of['steps']:5.2f} {of['accepted'] / of['proposed']:4.0%}" for of in cells)


def cases(target: str, quick: bool) -> Iterator[tuple[str, str, dict[str, Any], list[str]]]:
    """Draft, way, sizes and the options of these, of each demo of a target."""
    tensor_parallel = [({"tp": [p, d]}, ["--prefill-tp", str(p), "--decode-tp", str(d)]) for p, d in TP]
    for draft in [draft for of, draft in (*PAIRS, *EXPERTS, *DISTILLED) if of == target][: 1 if quick else None]:
        first, *others = tensor_parallel
        if (target, draft) in EXPERTS:
            first, *others = [({"dp": name}, ["--dp-attention", *args.split()]) for name, args in DP.items()]
        ways = [way for way in WAYS if way != "computed" or draft not in ("eagle", "mtp")]
        yield from ((draft, way, *first) for way in (ways[:1] if quick else ways))
        if not quick and (target, draft) not in DISTILLED:
            yield from ((draft, "handed over", *other) for other in others)


def measured(target: str, quick: bool, count: int) -> list[dict[str, Any]]:
    """Counts of each demo of a target, with so many prompts of a kind."""
    asked, rows = list(prompts(target, count)), []
    print("; ".join(f"{text}, {length}" for text in texts(target) for length in LENGTHS), flush=True)
    for draft, way, sizes, options in cases(target, quick):
        folder = str(smollm2.folder()) if target == "smollm2" else target
        found = counted(asked, ["--target", folder, "--draft", draft, *options, *WAYS[way]])
        rows.append({"draft": draft, "way": way, **sizes, "prompts": len(asked), "found": found})
        print(f"{target} + {draft}, {way:11}, {sizes}: {shown(found)}", flush=True)
    return rows


def main() -> int:
    parser = arguments(__doc__, "acceptance", quick="a prompt of each kind, one draft")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all of them by default")
    parser.add_argument("--prompts", type=int, metavar="N", help="of each kind (default 12, of SmolLM2 3)")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"unknown targets: {sorted(unknown)}")
    print(f"tokens a step and proposals accepted, greedy, {PROPOSED} proposed", flush=True)
    for target in args.targets or (TARGETS[:1] if args.quick else TARGETS):
        before = facts("torch") | {"proposed": PROPOSED, "new": NEW}
        rows = measured(target, args.quick, 1 if args.quick else args.prompts or PROMPTS.get(target, 12))
        earlier = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
        keep(
            args.out, {name: of for name, of in earlier.items() if name in TARGETS} | {target: before | {"rows": rows}}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
