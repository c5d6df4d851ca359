"""`kvproto`: the command line, of which each command imports only its own module."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvproto import __version__
from kvproto.errors import KvprotoError

GROUP = "kvproto.commands"
"""The entry points of other packages: functions that add a command with its `run`, or options to another command."""
_KNOWN = {
    "describe": "write the Description of a model and its parallel sizes, as JSON",
    "import": "read a capture of another engine's messages",
}
"""Commands of the distribution kvproto-engines."""
_MODULES = {
    "decode": "frames",
    "check": "plans",
    "plan": "plans",
    "probe": "probe",
    "tiers": "tiers",
    "find": "tiers",
    "tail": "top",
    "top": "top",
    "keygen": "codes",
    "errors": "codes",
}
"""Commands by the module of this package that adds them, which is imported for no other command."""
_EXTENDED = ("check", "plan")
"""Commands to which other packages may add options."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parser(words).parse_args(words)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # as with `kvproto ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KvprotoError, OSError, ValueError) as error:
        said = error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else error
        print(f"error: {said}", file=sys.stderr)
        return 1
    return status


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of a command line: of all commands, or of the one that it begins with if that stands alone."""
    parser = argparse.ArgumentParser(
        prog="kvproto", description="Tools for the contract by which LLM engines hand over KV caches."
    )
    parser.add_argument("--version", action=_Version, help="show program's version number and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    alone = words[0] if words and words[0] not in _EXTENDED else ""
    for module in dict.fromkeys([_MODULES[alone]] if alone in _MODULES else _MODULES.values()):
        import_module(f"kvproto.cli.{module}").add(commands)
    if alone not in _MODULES:
        _add_of_packages(commands)
    for listed in commands._choices_actions:  # `kvproto COMMAND --help` begins with what `kvproto --help` says
        text = listed.help or ""
        commands.choices[listed.dest].description = f"{text[:1].upper()}{text[1:]}."
    return parser


class _Version(argparse.Action):
    """Prints the versions; the tables, which take long to import, are read only for it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvproto.wire import tables

        print(f"kvproto {__version__}, spec {tables.SPEC}")
        parser.exit()


def _add_of_packages(commands: Any) -> None:
    """Add the commands of other packages; one that cannot be loaded says so when it is called."""
    from importlib.metadata import entry_points  # late, as it takes as long as most commands

    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in sorted({*entries, *_KNOWN}):
        if name not in entries:
            _add_absent(commands, name, f"pip install kvproto-engines=={__version__}, of which {name!r} is a command")
            continue
        try:
            add = entries[name].load()
        except (ImportError, AttributeError, KvprotoError) as error:
            _add_absent(commands, name, f"{name!r} of the entry points {GROUP}: {error} (install its package again)")
        else:
            add(commands)


def _add_absent(commands: Any, name: str, reason: str) -> None:
    """Add a command that says why it is not there."""
    absent = commands.add_parser(name, help=_KNOWN.get(name, "(broken)"), prefix_chars="\0", add_help=False)
    absent.add_argument("rest", nargs="*")
    absent.set_defaults(run=lambda _: print(f"error: {reason}", file=sys.stderr) or 1)


if __name__ == "__main__":
    sys.exit(main())
