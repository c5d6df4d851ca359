"""The commands: what each option means, and what each prints."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from kvproto_conformance import baseline, engines, html, meeting, report, terminal
from kvproto_conformance.cases import Case, claimed, load, of_minor
from kvproto_conformance.claims import EXTENSIONS, HIGHEST, LEVELS, PARTIAL, ROLES, SUITES, Claim
from kvproto_conformance.codec.facts import MAJOR, MESSAGES, MINOR, STRUCTS
from kvproto_conformance.data import LIBRARY, REGISTRY, SPEC, TEMPLATES, VECTORS, VERSION, sentence
from kvproto_conformance.explain import explain
from kvproto_conformance.fresh import fresh
from kvproto_conformance.run import PROTOCOL, BadGreeting, Greeting, Verdict, ended, greet, probes, run, verdict
from kvproto_conformance.testee import Testee

Json = dict[str, Any]
_FORMS = {"junit": report.junit, "html": html.page, "badge": report.badge, "summary": report.summary}
_RUSTC = "rustc --edition 2021 -O"
STARTS = {
    "python": [TEMPLATES / "minimal.py"],
    "node": [TEMPLATES / "node/codec.mjs"],
    "c": [TEMPLATES / "c/testee.c", LIBRARY / "include/kvproto.h", *sorted((LIBRARY / "src").glob("*.c"))],
    "rust": [TEMPLATES / "rust/testee.rs", *sorted((TEMPLATES / "rust/kvproto").glob("*.rs"))],
}
"""The files to begin with in each language: the first becomes `testee`, the others keep their names and folders."""
_NEXT = {
    "python": "kvproto-conformance smoke -- python {}",
    "node": "kvproto-conformance smoke -- node {}",
    "c": "gcc -std=c11 -O2 -o testee {} {folder}/kvproto.c && kvproto-conformance smoke -- ./testee",
    "rust": (
        f"cd {{folder}} && {_RUSTC} --crate-type rlib --crate-name kvproto kvproto/lib.rs\n"
        f"{_RUSTC} --extern kvproto=libkvproto.rlib -o testee testee.rs && kvproto-conformance smoke -- ./testee"
    ),
}


_SHOWN = 3
"""The number of errors of one kind that are printed."""


class Wrong(Exception):
    """An error that the user of the command can correct; the run is invalid."""


def ran(args: Namespace) -> int:
    """`run`: the cases of a claim against a testee."""
    _check_places(args)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    entries = baseline.read(args.baseline) if args.baseline else []
    begun = time.monotonic()
    with Testee(args.testee, args.patience, args.budget) as testee:
        greeting = greeted(testee, seed)
        claim = _claim(args, greeting)
        cases = _cases(args, claim.level)
        about = {case.about for case in cases if case.suite == "codec"} - {""}
        if strange := sorted(claim.messages - about):
            raise Wrong(f"the testee claims {strange[0]!r} in messages; there are cases of {', '.join(sorted(about))}")
        mine = claimed(cases, claim)
        asked = _chosen(mine, args)
        live = [case for case in asked if case.suite in engines.LIVE.values()]
        wanting = engines.unplayable(live, _engines(args)) if live else {}
        with terminal.Progress(len(asked)) as progress:
            results = run(
                [
                    *probes(seed),
                    *_fresh(args, seed, asked, entries, claim.minor),
                    *(case for case in asked if case not in live),
                ],
                testee,
                progress,
            )
            results.append(ended(testee))
            if live:
                playable = [case for case in live if case.id not in wanting]
                results += engines.played(playable, _engines(args), progress, begun + args.budget - time.monotonic())
    left_out = len(mine) - sum(result.case.suite != PROTOCOL for result in results)
    ids = {case.id for case in cases} | {result.case.id for result in results}
    results, complaints = baseline.apply(entries, results, ids, datetime.now(UTC).date())
    found = verdict(results, incomplete=left_out > 0)
    if complaints and found in (Verdict.CONFORMANT, Verdict.INCOMPLETE):
        found = Verdict.NONCONFORMANT
    seconds = time.monotonic() - begun
    one = report.Run(
        VERSION, tuple(args.testee), greeting, claim, seed, tuple(results), found, seconds, left_out,
        tuple(complaints), args.vectors, _engines(args) if live else {}, Counter(wanting.values()),
    )  # fmt: skip
    made = one.json()
    terminal.verdict(made, args.all)
    _written(made, args)
    return Verdict.CONFORMANT if found is Verdict.INCOMPLETE and args.allow_incomplete else found


def _cases(args: Namespace, level: str) -> list[Case]:
    """The cases of vectors, and from L3 on those of live engines."""
    return [*load(args.vectors), *(engines.scenarios() if level in engines.LIVE else ())]


def _fresh(args: Namespace, seed: int, asked: list[Case], entries: Sequence[baseline.Known], minor: int) -> list[Case]:
    """Cases that nobody can have learnt, but of what is known to fail, or of vectors of another version."""
    known = {case.about for case in asked if case.id in {entry.id for entry in entries}}
    able = [case for case in asked if case.about not in known]
    return of_minor(fresh(seed, able), minor) if args.vectors == VECTORS else []


def _engines(args: Namespace) -> dict[str, list[str]]:
    """By role, the command that starts the adapter of a live engine."""
    given = {"source": args.live_source, "sink": args.live_sink}
    return {role: shlex.split(command) for role, command in given.items() if command}


def greeted(testee: Testee, seed: int) -> Greeting:
    try:
        return greet(testee, VERSION, seed)
    except BadGreeting as error:
        raise Wrong(f"{testee.command[0]}: {error}") from None


def _claim(args: Namespace, greeting: Greeting) -> Claim:
    """The claim on the command line, or else the testee's own."""
    role, level = args.role or greeting.role, args.level or greeting.level
    extensions = [*(args.extension or ()), *(() if args.role or args.extension else greeting.extensions)]
    for what, said, all_ in (("role", role, ROLES), ("level", level, LEVELS)):
        if said not in all_:
            who = f"--{what}" if getattr(args, what) else f"{what}, in the testee's hello,"
            raise Wrong(f"{who} is one of {', '.join(all_)}" + (f", not {said}" if said else "; it says none"))
    if unknown := sorted({*extensions} - EXTENSIONS.keys()):
        raise Wrong(f"extension {unknown[0]}: there are {', '.join(EXTENSIONS)}")
    if level > HIGHEST.get(role, "L4"):
        raise Wrong(f"a {role} has no level above {HIGHEST[role]}")
    messages = frozenset(greeting.messages if role in PARTIAL else ())
    return Claim(role, level, frozenset(extensions), messages, _minor(greeting.spec))


def _minor(stated: str) -> int:
    """The minor version that a testee was made for, if the suite has it."""
    known = [f"{MAJOR}.{minor}" for minor in range(MINOR + 1)]
    if stated not in known:
        raise Wrong(f"spec, in the testee's hello, is one of {', '.join(known)}, not {stated}")
    return known.index(stated)


def _chosen(cases: list[Case], args: Namespace) -> list[Case]:
    chosen = [case for case in cases if args.only in case.id and case.suite in (args.suite or SUITES)]
    if not chosen:
        if args.suite and not any(case.suite in args.suite for case in cases):
            raise Wrong(f"no case of this claim: {'; '.join(map(_asked_of, args.suite))}")
        where = f" of suite {', '.join(args.suite)}" if args.suite else ""
        raise Wrong(f"no case of this claim{where} has an id with {args.only!r} in it; `list` says which there are")
    return chosen


def _asked_of(suite: str) -> str:
    """The claims that a suite applies to."""
    asked = SUITES[suite]
    roles = ", ".join(role for role in ROLES if role in asked.roles)
    extension = f", with --extension {asked.extension}" if asked.extension else ""
    return f"suite {suite} is asked of {roles}, from {asked.level} on{extension}"


def _check_places(args: Namespace) -> None:
    """Refuse at once a run whose reports cannot be written, and empty those of an earlier run."""
    paths: dict[str, Path | None] = {name: getattr(args, name) for name in ("report", *_FORMS)}
    given = [(name, path) for name, path in paths.items() if path is not None]
    for name, path in given:
        if path.is_dir():
            raise Wrong(f"--{name} {path}: this is a folder; name a file in it")
        if not path.absolute().parent.is_dir():
            raise Wrong(f"--{name} {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise Wrong(f"--{name} {path}: it may not be written")
    for name, path in given:
        try:
            path.open("w").close()
        except OSError as error:
            raise Wrong(f"--{name} {path}: it may not be written: {error.strerror}") from None


def _written(made: Json, args: Namespace) -> None:
    try:
        if args.report:
            args.report.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        for name, form in _FORMS.items():
            if path := getattr(args, name):
                path.write_text(form(made), encoding="utf-8", errors="backslashreplace")
        if path := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(report.summary(made))
    except OSError as error:
        raise Wrong(f"{error.filename or 'a report'}: {error.strerror}") from None


def smoked(args: Namespace) -> int:
    """`smoke`: does it start, greet, answer, say no, and end."""
    cases = load()
    with Testee(args.testee, args.patience) as testee:
        greeting = greeted(testee, 0)
        print(f"hello   {greeting.name} {greeting.version} ({greeting.language})")
        messages = greeting.messages or ("DoneAck",)
        some = [c for c in cases if c.suite == "codec" and c.about in messages][:8]
        claim = Claim(greeting.role or "codec", "L1", frozenset(), frozenset(messages))
        results = [*run([*probes(0), *claimed(some, claim)], testee), ended(testee)]
    for result in results:
        print(f"{result.status:<7} {result.case.id}: {result.case.note}")
        for wrong in result.wrong:
            print(
                "        "
                + report.text({"question": wrong.question, "expected": wrong.expected, "got": wrong.got}).replace(
                    "\n", "\n        "
                )
            )
    broken = [r for r in results if any(wrong.kind for wrong in r.wrong)]
    answered = sum(not result.wrong for result in results)
    what = "the testee protocol is not kept yet: spec/v1/testee.md" if broken else "the testee protocol works"
    print(f"{what}; {answered} of {len(results)} answers are right. Next: kvproto-conformance run")
    return Verdict.NONCONFORMANT if answered < len(results) else Verdict.CONFORMANT


def met(args: Namespace) -> int:
    """`meet`: does it interoperate with what is kept: vectors, bytes both ways, negotiation, sessions."""
    versions = meeting.kept()
    today, failed = meeting.Version(json.loads(REGISTRY.read_text(encoding="utf-8"))), 0
    with Testee(args.testee, args.patience) as testee:
        greeting = greeted(testee, 0)
        claim = _claim(Namespace(role="", level="", extension=()), greeting)
        for kept in versions:
            counts = kept.name in meeting.last(versions)
            print(f"{kept.name}{'' if counts else ', which a later candidate has replaced'}:")
            with Testee(kept.command, args.patience) as old:
                greet(old, VERSION, 0)
                for what, wrong, asked in meeting.all_of(kept, old, testee, claim, today):
                    print(f"  {what}: {asked - len(wrong):,} of {asked:,}")
                    for each in wrong[:_SHOWN]:
                        print(f"    {each}")
                    failed += len(wrong) if counts else 0
            for role, command in _engines(args).items():
                good, said = kept.live(role, meeting.SESSIONS[role], command)
                *lines, summary = said.splitlines()
                print(f"  a peer of old meets the {role}: {summary}")
                for line in [line for line in lines if not line.startswith("pass")]:
                    print(f"    {line}")
                failed += not good and counts
    return Verdict.NONCONFORMANT if failed else Verdict.CONFORMANT


def listed(args: Namespace) -> int:
    """`list`: the cases, of a claim or all."""
    cases = _cases(args, "L4")
    if args.role or args.level:
        role, level = args.role or "both", args.level or "L4"
        cases = claimed(cases, Claim(role, level, frozenset(args.extension or ())))
    cases = _chosen(cases, args)
    if args.json:
        print(json.dumps([_facts(case) for case in cases], indent=1))
        return 0
    for case in cases:
        print(f"{case.id:<40} {SUITES[case.suite].level} {case.suite:<12} {case.clause:<24} {case.note}")
    return 0


def _facts(case: Case) -> Json:
    return {
        "id": case.id, "level": SUITES[case.suite].level, "suite": case.suite, "clause": case.clause,
        "must": case.must, "extensions": sorted(case.needs), "either": sorted(case.either),
        "beyond": [name for name, _ in case.beyond], "about": case.about, "note": case.note,
    }  # fmt: skip


def shown(args: Namespace) -> int:
    """`show ID`: a case with its clause, its questions, and its bytes explained."""
    case = case_of(args.id, _cases(args, "L4"))
    clause = sentence(case.clause)
    print(f"{case.id}: {case.note}\n\n{case.clause} ({clause['page']}): {clause['text']}\n")
    for ask in case.asks:
        print(f"asked    {json.dumps(ask.question)}\nexpected {json.dumps(ask.expected)}\n")
    for name, path in case.beyond:
        print(f"without extension {name}, as good: LAYOUT_UNSUPPORTED at {path}\n")
    print(engines.steps(case.id), end="")
    print("\n".join(line for ask in case.asks[:1] for line in html.explained(ask.question)))
    return 0


def case_of(id_: str, cases: list[Case]) -> Case:
    found = next((case for case in cases if case.id == id_), None)
    if found is None:
        near = [case.id for case in cases if id_.rpartition("/")[2] in case.id][:5]
        raise Wrong(f"there is no case {id_}" + (f"; there are {', '.join(near)}" if near else ""))
    return found


def explained(args: Namespace) -> int:
    """`explain HEX`: what bytes say."""
    try:
        data = bytes.fromhex("".join(args.hex))
    except ValueError:
        raise Wrong("these are no hex digits") from None
    if args.struct and args.struct not in STRUCTS | MESSAGES:
        raise Wrong(f"there is no struct {args.struct}; there are {', '.join(sorted(STRUCTS))}")
    print("\n".join(explain(data, args.struct)))
    return 0


def baselined(args: Namespace) -> int:
    """`baseline REPORT`: what failed, as a baseline, on stdout."""
    try:
        until = date.fromisoformat(args.until)
    except ValueError:
        raise Wrong('--until is a day, as "2027-01-31"') from None
    print(baseline.made(report.read(args.report), args.issue, until), end="")
    return 0


def matrixed(args: Namespace) -> int:
    """`matrix REPORT...`: implementations by suites."""
    found = [report.read(path) for path in args.reports]
    print(html.matrix(found) if args.html else html.matrix_text(found), end="")
    return 0


def copied(args: Namespace) -> int:
    """`copy DIR`: the specification's pages, vectors, registry, clauses and schemas, for use without this suite."""
    try:
        shutil.copytree(VECTORS, args.folder / "vectors", dirs_exist_ok=True)
        for path in (REGISTRY, *sorted({*SPEC.glob("*.md"), *SPEC.glob("*.json")} - {SPEC / REGISTRY.name})):
            shutil.copy(path, args.folder)
    except OSError as error:
        raise Wrong(f"{args.folder}: {error.strerror or error}") from None
    print(f"{args.folder}: the pages, vectors/, registry.json, clauses.json, and schemas of Descriptions and tickets")
    return 0


def _place(source: Path) -> Path:
    """The place of a file to begin with in its folder, in which sources of the crate have one of their own."""
    crate = TEMPLATES / "rust"
    return source.relative_to(crate) if source.is_relative_to(crate) else Path(source.name)


def started(args: Namespace) -> int:
    """`init-testee`: a testee to begin with."""
    sources = STARTS[args.lang]
    targets = [args.folder / _place(source) for source in sources]
    targets[0] = args.folder / f"testee{sources[0].suffix}"
    for target in targets:
        if target.exists():
            raise Wrong(f"{target} is there already")
    for source, target in zip(sources, targets, strict=True):
        try:
            if target.parent != args.folder:
                target.parent.mkdir(exist_ok=True)
            with target.open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8"))
            target.chmod(0o755)
        except OSError as error:
            raise Wrong(f"{target}: {error.strerror}") from None
    print(*targets, _NEXT[args.lang].format(targets[0], folder=shlex.quote(str(args.folder))), sep="\n")
    return 0


def options(parser: ArgumentParser) -> None:
    """Add the options that state the claim and choose cases."""
    parser.add_argument("--role", choices=ROLES, help="; ".join(f"{name}: {says}" for name, says in ROLES.items()))
    parser.add_argument("--level", choices=LEVELS, help="; ".join(f"{name}: {says}" for name, says in LEVELS.items()))
    parser.add_argument(
        "--extension",
        action="append",
        choices=EXTENSIONS,
        help="; ".join(f"{name}: {says}" for name, says in EXTENSIONS.items()),
    )
    parser.add_argument("--only", default="", metavar="PART", help="cases whose id contains this")
    parser.add_argument("--suite", action="append", choices=SUITES, help="cases of these suites")
    parser.add_argument("--vectors", type=Path, default=VECTORS, help="folder of cases")


def fail(error: Exception) -> int:
    """Say what is wrong with the run itself."""
    print(f"error: {error}", file=sys.stderr)
    return Verdict.INVALID_RUN
