"""Extension LARGE: copies of a gigabyte that are stopped while they are under way, after which no byte may change."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvproto_conformance.live import world
from kvproto_conformance.live.memory import Bytes, holds
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.sink import Request, Sink
from kvproto_conformance.live.watch import Frame

_WRITES_ON = "A copy that nobody stops goes on into pages that have been given to another request."
_TOKENS = 2048
"""Of a gigabyte."""
_STEP = 16_411
"""Every how many bytes the suite looks what has been written: prime, so that it is each lane's turn."""
_ATTEMPTS = 5
"""Times that a copy may be over before it is stopped."""


def _ready(run: PrefillRun, *offered: str) -> Sink:
    pages = [group for group in run.live.geometry["groups"] if group["kind"] == "PAGE"]
    sink = run.ready(items=max(-(-_TOKENS // world.other_rows(group)) for group in pages), offered=offered)
    run.chosen(sink)
    return sink


def _begin(run: PrefillRun, sink: Sink) -> tuple[Prompt, Request]:
    """Prefill is over, and the first bytes of a gigabyte have been written."""
    assert sink.memory is not None
    np.invert(sink.memory.bytes, out=sink.memory.bytes)  # other than the engine has, even where it was copied before
    sink.image[:] = sink.memory.bytes
    sink.used.clear()
    prompt = run.prompt(_TOKENS)
    made = sink.request(prompt.key, prompt.tokens)
    run.take(prompt)
    sink.ask_for(made)
    run.finish(prompt)
    end = time.monotonic() + 20.0
    while not _written(sink):
        if time.monotonic() > end:
            raise Missed("no byte of a gigabyte is written 20 s after prefill was over", "KVP-TRN-ORDER")
        time.sleep(0.001)
    return prompt, made


def _sample(sink: Sink) -> Bytes:
    """Some bytes of the memory, from end to end; taken within a millisecond or two."""
    assert sink.memory is not None
    return sink.memory.bytes[::_STEP].copy()


def _written(sink: Sink) -> float:
    """The share of the memory that has changed."""
    return float((_sample(sink) != sink.image[::_STEP]).mean())


def _stop(
    run: PrefillRun, sink: Sink, stop: Callable[[Request], Frame], again: Callable[[], object] = lambda: None
) -> None:
    """Begin copies until one is under way when `stop` ends it, and returns the proof; then nothing may be written."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            again()
        prompt, made = _begin(run, sink)
        under_way = _written(sink) < 0.9
        proof = stop(made)
        _still(run, sink, proof)
        run.engine.ask("fail", id=prompt.id, reason="over")
        run.engine.ask("wait", id=prompt.id, seconds=5.0)
        if under_way:
            break
    run.check("stopped under way", under_way, f"{_ATTEMPTS} copies were over before they were to be stopped")
    sink.used.clear()


def _still(run: PrefillRun, sink: Sink, proof: Frame) -> None:
    """Check a proof, and that nothing is written after it."""
    assert sink.memory is not None
    held, end = _sample(sink), time.monotonic() + 0.3
    mapped = proof.name == "Unregistered" and holds(run.engine.pids, sink.memory.nonce)
    run.check("unmapped", not mapped, "PROVEN, and still mapped", "KVP-EPO-UNMAP")
    run.check("proven", proof.fields["proof"] == "PROVEN", proof.fields["proof"], "KVP-END-PROVEN")
    while time.monotonic() < end:
        if late := int((_sample(sink) != held).sum()):
            raise Missed(f"after PROVEN {late} of {len(held)} bytes changed", "KVP-END-PROVEN")
    sink.silence(0.0)
    sink.image[:] = sink.memory.bytes


@scenario("LIVE-1281", "Abort while a gigabyte is copied: once it is PROVEN, no byte changes", "KVP-END-PROVEN",
          guards=_WRITES_ON, level="L4", world="large", extensions=("LARGE",))  # fmt: skip
def _abort(run: PrefillRun) -> None:
    sink = _ready(run)
    _stop(run, sink, lambda made: sink.ask("Abort", "Drained", **sink.named(made), reason="the client is gone"))
    run.hand_over(sink, run.prompt(17))


@scenario("LIVE-1282", "memory is asked back at once while a gigabyte is copied into it", "KVP-EPO-MOVED",
          "KVP-EPO-UNMAP", guards=_WRITES_ON, level="L4", world="large", extensions=("LARGE", "EPOCHS"))  # fmt: skip
def _at_once(run: PrefillRun) -> None:
    sink = _ready(run, "EPOCHS")

    def take_back(made: Request) -> Frame:
        asked = sink.send("Unregister", request=sink.next_id(), epoch=str(sink.epoch), at_once=True)
        run.refused(sink, None, "Failed", "POOL_MOVED", None, "KVP-EPO-MOVED", made.sequence)
        return sink.expect("Unregistered", again=asked, clause="KVP-EPO-UNMAP")

    _stop(run, sink, take_back, sink.move)
    sink.move()
    run.hand_over(sink, run.prompt(17))
