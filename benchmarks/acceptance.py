"""How many tokens a step of decode gives with the draft's cache handed over, computed again, and cold.

`python benchmarks/acceptance.py [--out] [--quick]`, or `make acceptance`: a prefill and a decode engine of the demo, in
processes of their own, greedily continue prompts of several lengths, of the text that the models were trained on and of
one that they have never seen (the licence of this repository). Draft and target differ in architecture, and both engines
in TP. Each request is compared with one undivided engine that begins alike: its tokens, and how many proposals of the
draft it accepts.

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

from kvproto_reference.data import load_text

PAIRS = [(target, draft) for target in ("mla", "gqa") for draft in ("gqa", "mla", "eagle")]
"""Architectures of target and draft; `eagle` is a head that reads the target's hidden states."""
WAYS = {"handed over": (), "computed": ("--cold-draft", "compute"), "cold": ("--cold-draft", "zero")}
TP = [(2, 1), (1, 2), (4, 2)]
"""TP ranks of prefill and of decode."""
LENGTHS = (24, 96, 320)
"""Tokens of a prompt, which are bytes here."""
PROPOSED, NEW = 4, 48
"""Tokens that a draft proposes at a time, and that each request generates."""


def texts() -> dict[str, str]:
    """The text of training and another, without the blank lines that separate prompts."""
    seen, other = load_text(), (ROOT / "LICENSE").read_text(encoding="ascii")
    return {"trained on": _joined(seen), "never seen": _joined(other)}


def _joined(text: str) -> str:
    return "\n".join(words for line in text.splitlines() if (words := line.strip()))


def prompts(count: int) -> Iterator[tuple[str, int, str]]:
    """The text, length and words of each prompt: `count` of a kind, evenly spread over their text."""
    for name, text in texts().items():
        for length in LENGTHS:
            for n in range(count):
                start = n * (len(text) - length) // count
                yield name, length, text[start : start + length].strip("\n")


def counted(asked: list[tuple[str, int, str]], args: list[str]) -> dict[str, Any]:
    """Counts of a demo by text and length; raises RuntimeError if it differs from one undivided engine."""
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
        of = found.setdefault(text, {}).setdefault(str(length), dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            of[name] += request[name]
    return found


_COUNTS = ("steps", "decoded", "proposed", "accepted")


def shown(found: dict[str, Any]) -> str:
    """Tokens a step and the share of proposals that were accepted, by text and length."""
    cells = (of for lengths in found.values() for of in lengths.values())
    return "  ".join(f"{of['decoded'] / of['steps']:5.2f} {of['accepted'] / of['proposed']:4.0%}" for of in cells)


def main() -> int:
    parser = arguments(__doc__, "acceptance", quick="a prompt of each kind, one pair")
    args = parser.parse_args()
    asked = list(prompts(1 if args.quick else 12))
    heads = [f"{text}, {length}" for text in texts() for length in LENGTHS]
    print(f"tokens a step and proposals accepted, greedy, {PROPOSED} proposed: {'; '.join(heads)}", flush=True)
    cases = [(pair, way, TP[0]) for pair in PAIRS for way in WAYS if pair[1] != "eagle" or way != "computed"]
    cases += [(pair, "handed over", tp) for pair in PAIRS for tp in TP[1:]]
    rows = []
    for (target, draft), way, (here, there) in cases[:1] if args.quick else cases:
        of = ["--target", target, "--draft", draft, "--prefill-tp", str(here), "--decode-tp", str(there), *WAYS[way]]
        found = counted(asked, of)
        rows.append({"target": target, "draft": draft, "way": way, "tp": [here, there], "found": found})
        print(f"{target} + {draft}, {way:11}, TP {here} to {there}: {shown(found)}", flush=True)
    keep(args.out, facts("torch") | {"proposed": PROPOSED, "new": NEW, "prompts": len(asked), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
