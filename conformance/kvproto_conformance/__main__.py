"""`kvproto-conformance`: shows whether an implementation in any language keeps the contract.

Exit status of `run`: 0 conformant, 1 nonconformant, 2 the run itself is invalid, 3 incomplete.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from kvproto_conformance import binding, commands, replaying
from kvproto_conformance.baseline import BadBaseline
from kvproto_conformance.claims import EXTENSIONS, ROLES
from kvproto_conformance.data import VECTORS, VERSION
from kvproto_conformance.report import BadReport
from kvproto_conformance.testee import CannotStart


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a testee may say anything
    try:
        return int(args.does(args))
    except (commands.Wrong, BadBaseline, BadReport, CannotStart) as error:
        return commands.fail(error)
    except BrokenPipeError:  # the reader of the output closed the pipe
        sys.stdout = None
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvproto-conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")

    one = _command(sub, "run", commands.ran)
    commands.options(one)
    one.add_argument("--report", type=Path, metavar="FILE", help="the run as JSON, for replay, baseline and matrix")
    for form in ("junit", "html", "badge", "summary"):
        one.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"the run as {form}")
    one.add_argument("--baseline", type=Path, metavar="FILE", help="failures that are known")
    one.add_argument("--allow-incomplete", action="store_true", help="exit status 0 where nothing failed")
    one.add_argument("--seed", type=int, help="of what is made up; of the report, to make it up again")
    for role in ("source", "sink"):
        one.add_argument(f"--live-{role}", metavar="COMMAND", help=f"the adapter of a live {role}, for L3 and L4")
    one.add_argument("--budget", type=float, default=600, metavar="SECONDS", help="of the whole run (600)")
    one.add_argument("--all", action="store_true", help="print every failure")
    _testee(one, "+")

    _testee(_command(sub, "smoke", commands.smoked), "+")

    one = _command(sub, "meet", commands.met)
    for role in ("source", "sink"):
        one.add_argument(
            f"--live-{role}", metavar="COMMAND", help=f"the adapter of a live {role}: it meets peers of old"
        )
    _testee(one, "+")

    one = _command(sub, "list", commands.listed)
    commands.options(one)
    one.add_argument("--json", action="store_true")

    one = _command(sub, "clauses", binding.clausal)
    one.add_argument("--role", choices=ROLES, required=True)
    one.add_argument("--extension", action="append", choices=EXTENSIONS, metavar="NAME", help="with its clauses too")

    one = _command(sub, "show", commands.shown)
    one.add_argument("id")
    one.add_argument("--vectors", type=Path, default=VECTORS, help=argparse.SUPPRESS)

    one = _command(sub, "explain", commands.explained)
    one.add_argument("hex", nargs="+", help="digits of a frame")
    one.add_argument("--struct", default="", metavar="NAME", help="they are a bare struct")

    one = _command(sub, "replay", replaying.replayed)
    one.add_argument("report", type=Path)
    one.add_argument("id")
    one.add_argument("--vectors", type=Path, default=VECTORS, help=argparse.SUPPRESS)
    _testee(one, "*")

    one = _command(sub, "baseline", commands.baselined)
    one.add_argument("report", type=Path)
    one.add_argument("--issue", required=True, metavar="URL", help="where they are tracked")
    one.add_argument("--until", required=True, metavar="DAY", help="by when they are to be mended, as 2027-01-31")

    one = _command(sub, "matrix", commands.matrixed)
    one.add_argument("reports", type=Path, nargs="+")
    one.add_argument("--html", action="store_true", help="a page instead of Markdown")

    _command(sub, "copy", commands.copied).add_argument("folder", type=Path)

    one = _command(sub, "init-testee", commands.started)
    one.add_argument("--lang", choices=commands.STARTS, default="python")
    one.add_argument("folder", type=Path, nargs="?", default=Path())
    return parser


def _command(
    sub: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: object
) -> argparse.ArgumentParser:
    says = (does.__doc__ or "").partition(": ")[2]
    one = sub.add_parser(name, help=says.rstrip("."), description=says)
    one.set_defaults(does=does)
    return one


def _testee(one: argparse.ArgumentParser, number: str) -> None:
    one.add_argument("--patience", type=float, default=5, metavar="SECONDS", help="for each answer (5)")
    one.add_argument("testee", nargs=number, metavar="-- COMMAND", help="of the implementation under test")


if __name__ == "__main__":
    sys.exit(main())
