"""Runs scenarios against an adapter, one after the other, and reports the outcome of each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from kvproto_conformance.live import nixl
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.engine import EngineFault, Unsupported
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import SCENARIOS, Check, Live, Run, Scenario
from kvproto_conformance.live.watch import ENGINE, Blamed
from kvproto_conformance.testee import NOT_ASKED

_SILENCES = 3
"""The number of questions that an engine may leave unanswered until it gets no more."""

UNSHARED = "about memory that another process writes, and the engine answers `open` with SHM by unsupported"
"""The reason that a scenario is not asked."""


@attrs.frozen
class Result:
    """The outcome of one scenario.

    Fields:
        id: The scenario's id.
        status: pass, fail (of what is a SHOULD too), error (the engine crashed, hung or answered garbage), suite-error,
            unsupported, or unasked.
        checks: What was checked, in order.
        text: Why it did not pass or was not asked; empty if it passed.
        clause: The clause that was broken, if known.
        seconds: How long it took.
        log: The messages of each connection: seconds, sender, name, and fields or bytes in hex.
    """

    id: str
    status: str
    checks: tuple[Check, ...]
    text: str
    clause: str
    seconds: float
    log: tuple[tuple[tuple[float, str, str, Any], ...], ...] = attrs.field(repr=False, default=())


def list_scenarios(role: str | None = None, level: str | None = None) -> list[Scenario]:
    """All scenarios, or those of one role up to one level."""
    return [s for s in SCENARIOS.values() if role in (None, s.role) and (level is None or s.level <= level)]


def run(command: Sequence[str], scenarios: Iterable[Scenario], seconds: float = math.inf) -> Iterator[Result]:
    """Run scenarios with an adapter that `command` starts.

    An engine serves all scenarios of its world and transport, until one does not pass or leaves pages that nobody can
    give back. One that does not answer `open`
    is not started for that world and transport again. One that has left three questions unanswered, or has had this
    many `seconds`, is asked nothing more. Scenarios over SHM go over INLINE with an engine that has no SHM; it is not
    asked those about memory that another process writes.
    """
    silences, over = 0, time.monotonic() + seconds
    live: Live | None = None
    silent: dict[tuple[str, str, str, bool], str] = {}
    """Reasons that there is no engine, by what it was to be opened with."""
    shared = True
    """Whether the engine has not said that it has no SHM."""
    try:
        for stated in scenarios:
            each = stated if shared or stated.transport != "SHM" else attrs.evolve(stated, transport="INLINE")
            key = each.role, each.world, each.transport, "CURVE" in each.extensions
            if live is not None and (live.key != key or not live.engine.alive):
                live.stop()
                live = None
            begin = time.monotonic()
            if silences >= _SILENCES or begin >= over:
                why = "the time of this run is over" if begin >= over else "it was silent too often before"
                yield Result(each.id, "error", (), f"{NOT_ASKED}: {why}", "", 0.0)
                continue
            if lacks(each):
                yield Result(each.id, "suite-error", (), lacks(each), "", 0.0)
                continue
            if key in silent:
                yield Result(each.id, "error", (), f"not started again: {silent[key]}", "", 0.0)
                continue
            try:
                if live is None and shared and each.transport == "SHM":
                    try:
                        live = Live(command, *key)
                    except Unsupported:
                        shared, each = False, attrs.evolve(each, transport="INLINE")
                        key = each.role, each.world, each.transport, "CURVE" in each.extensions
                live = live or Live(command, *key)
            except EngineFault as fault:
                if fault.kind == "timeout":
                    silent[key] = str(fault)
                    silences += 1
                yield Result(each.id, "error", (), str(fault), "", time.monotonic() - begin)
                continue
            except Unsupported as said:
                yield Result(each.id, "unsupported", (), str(said), "", time.monotonic() - begin)
                continue
            if each.maps and not shared:
                yield Result(each.id, "unasked", (), UNSHARED, "", 0.0)
                continue
            result = _one(live, each)
            silences += result.status == "error" and result.text.startswith("timeout")
            if each.spoils or result.status not in ("pass", "unsupported") or live.engine.held:
                live.stop()
                live = None
            yield result
    finally:
        if live is not None:
            live.stop()


def lacks(scenario: Scenario) -> str:
    """The need of a scenario that the suite's side cannot meet; empty if it meets all."""
    wanted = scenario.transport == "NIXL" and not nixl.is_there()
    return "NIXL beside the suite (pip install nixl)" if wanted else ""


def _one(live: Live, scenario: Scenario) -> Result:
    begin = time.monotonic()
    made: Run = (PrefillRun if scenario.role == "source" else DecodeRun)(live, scenario)
    status, text, clause = "pass", "", ""
    try:
        scenario.script(made)
        if scenario.level == "L4" and not scenario.spoils:
            made.probe()
        made.leave()
    except Blamed as blamed:
        status = "fail" if blamed.who == ENGINE else "suite-error"
        text, clause = f"{blamed.who}: {blamed}", blamed.clause
    except Missed as missed:
        status, text, clause = "fail", str(missed), missed.clause
    except EngineFault as fault:
        status, text = "error", str(fault)
    except Unsupported as said:
        status, text = "unsupported", str(said)
    except Exception as error:  # the suite's own fault must not end the run
        status, text = "suite-error", f"{type(error).__name__}: {error}"
    wrong = next((check for check in made.checks if not check.good), None)
    if status in ("pass", "suite-error") and wrong is not None:  # what the suite does after that may not fit any more
        status, text, clause = "fail", f"{wrong.name}: {wrong.text}", wrong.clause
    if status != "pass":
        made.drop()
    log = tuple(tuple(peer.watch.log) for peer in made.peers)
    return Result(scenario.id, status, tuple(made.checks), text, clause, time.monotonic() - begin, log)
