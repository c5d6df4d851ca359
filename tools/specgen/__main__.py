"""`python -m tools.specgen`: write what follows from the registry.

`--check` compares, `--lock WHY` renews the locks, and `--open NAME WHY` freezes what is stable as a candidate. A candidate
that no tag has published may be opened again: `--open NAME` takes its snapshot anew.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from tools.files import renew
from tools.specgen import (
    candidates,
    clauses,
    drawings,
    lock,
    markdown,
    minors,
    named,
    promela,
    python,
    rust,
    schema,
    testees,
)
from tools.specgen.lint import RegistryError, lint
from tools.specgen.registry import ROOT, SPEC, Facts, as_json, load
from tools.specgen.stamp import stamped

_SHOWN = 40
"""Lines of one kind that are printed."""


def modules(facts: Facts) -> dict[Path, str]:
    """The generated modules of kvproto."""
    return {
        ROOT / "kvproto/wire/enums.py": python.enums_module(facts),
        ROOT / "kvproto/wire/messages.py": python.messages_module(facts),
        ROOT / "kvproto/wire/tables.py": python.tables_module(facts),
        ROOT / "kvproto/planning/parts.py": python.parts_module(facts),
        ROOT / "kvproto/planning/limits.py": python.limits_module(facts, "plan"),
        ROOT / "kvproto/session/limits.py": python.limits_module(facts, "session"),
        ROOT / "kvproto/net/limits.py": python.limits_module(facts, "net"),
        ROOT / "kvproto/observability/names.py": python.metrics_module(facts),
        ROOT / "kvproto/session/transitions.py": python.transitions_module(facts),
    }


def outputs() -> dict[Path, str]:
    """Every generated file and its text."""
    facts = load()
    lint(facts)
    made = {
        **modules(facts),
        SPEC / "lifecycle/moves.pml": promela.moves_model(facts),
        SPEC / "registry.json": as_json(facts),
        SPEC / "clauses.json": clauses.as_json(facts),
        **markdown.pages(facts),
        **drawings.drawings(facts),
        **minors.vectors(facts),
        **testees.testees(facts),
        **schema.schemas(facts),
        **rust.crate(facts),
    }
    return made | stamped(facts, made)


def main(argv: list[str] | None = None) -> int:
    """Write all outputs; or, by options, compare them and the locks, renew the locks, or open a candidate."""
    parser = argparse.ArgumentParser(prog="python -m tools.specgen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 naming what differs, locks too")
    parser.add_argument("--lock", metavar="WHY", help="renew the locks; WHY goes into the changelog")
    parser.add_argument(
        "--open", metavar="NAME", help="freeze what is stable as a candidate, such as rc2; then a WHY follows"
    )
    parser.add_argument(
        "why", metavar="WHY", nargs="?", default="", help="why; one that is opened again keeps its reason"
    )
    args = parser.parse_args(argv)
    try:
        if args.open:
            candidates.stated(load(), args.open, args.why)
        facts = load()
        stale = renew(outputs(), args.check)
        from tools.specgen import frozen, shown  # they import the suite, which reads what has just been written

        clauses.check(facts)
        if args.open:
            lock.opened(facts, facts["candidate"][-1]["why"])
            print(f"kept: {frozen.keep(facts).relative_to(ROOT)}")
        broken = frozen.broken(facts)
        if broken and args.lock is not None:
            raise RegistryError(_FROZEN.format("\n".join(broken[:_SHOWN])))
        unnamed = [*named.unnamed(facts), *(shown.unshown(facts) if args.check else ())]
        differing = lock.renew(facts, args.lock) if args.lock is not None else lock.differences(facts)
    except RegistryError as error:
        print(f"error: {error}")
        return 1
    _print("frozen", broken)
    _print("locked" if args.lock is not None else "differs", differing)
    _print("unheld", unnamed if args.check else [])
    if broken:
        last = facts["candidate"][-1]["version"]
        print(f'what is frozen needs a new candidate, or {last} again if it is not tagged yet: --open NAME "why"')
    elif differing and args.check:
        print('a change of what is locked needs a reason: python -m tools.specgen --lock "why"')
    return 1 if args.check and (stale or broken or differing or unnamed) else 0


_FROZEN = "what is frozen does not change until the next candidate (--open):\n{}"


def _print(what: str, lines: list[str]) -> None:
    for line in lines[:_SHOWN]:
        print(f"{what}: {line}")
    if len(lines) > _SHOWN:
        print(f"... and {len(lines) - _SHOWN} more")


if __name__ == "__main__":
    gc.disable()  # rows and cases have no cycles, and looking for some takes a quarter of the time
    sys.exit(main())
