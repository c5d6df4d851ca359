"""Extension SLEEP, in both roles: an engine takes its memory back for a while, and goes on with other memory."""

from __future__ import annotations

from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.pull import PullSink
from kvproto_conformance.live.scenario import Run, scenario
from kvproto_conformance.live.source import Source

_POOL = "Memory that an engine lends to training is still read or written by its peers, or no peer is served again."
_CACHES = "A draft is loaded or dropped, and peers go on by the plan of before: pages of one model land in another."
_BOTH = ("EPOCHS", "SLEEP")


def _wake(run: Run, world: str | None = None) -> None:
    """Let the engine go on with other memory, of the same caches or of another world's."""
    run.live.wake(world or run.scenario.world)


def _free(run: Run, seconds: float = 5.0) -> bool:
    return bool(run.engine.ask("returned", seconds=seconds)["free"])


@scenario("LIVE-1611", "what waits is lost by POOL_MOVED, and the session goes on", "KVP-EPO-MOVED", guards=_POOL,
          extensions=_BOTH)  # fmt: skip
def _waits(run: PrefillRun) -> None:
    sink, prompt = run.ready(offered=["EPOCHS"]), run.prompt()
    run.hand_over(sink)
    run.take(prompt)
    made = run.ask_for(sink, prompt)
    run.engine.ask("sleep")
    run.refused(sink, None, "Failed", "POOL_MOVED", None, "KVP-EPO-MOVED", made.sequence)
    run.check("its memory is its own", _free(run), "nobody reads it, and it is not free", "KVP-EPO-FREE")
    run.untouched(sink)
    _wake(run)
    run.hand_over(sink)


_OFTEN = 25
"""Times that the suite looks whether memory is free."""


def _drain(source: Source) -> None:
    """Answer Abort, if it comes; an engine may leave it out, as it asks for its memory at once."""
    for abort in source.silence(0.1):
        source.reply(abort, "Drained", proof="PROVEN")


def _lent(run: PrefillRun, *features: str) -> PullSink:
    sink = run.ready(offered=["PULL", *features])
    run.chosen(sink)
    assert isinstance(sink, PullSink)
    run.hand_over(sink)
    run.engine.ask("sleep")
    return sink


@scenario("LIVE-1612", "memory that a sink may read is asked back, and is free once it is unmapped", "KVP-EPO-FREE",
          "KVP-EPO-RISE", guards=_POOL, extensions=("PULL", *_BOTH))  # fmt: skip
def _asked_back(run: PrefillRun) -> None:
    sink = _lent(run, "EPOCHS")
    back = sink.expect("Unregister", clause="KVP-EPO-MOVED")
    epoch = back.fields["epoch"]
    run.check("the epoch that was lent", epoch == sink.lent[0], epoch, "KVP-EPO-RISE")
    run.check("not free yet", not _free(run, 0.2), "free, though a sink may read it", "KVP-EPO-FREE")
    sink.give_up(back)
    run.check("free", _free(run), "Unregistered with PROVEN, and not free", "KVP-EPO-FREE")
    _wake(run)
    sink.borrow()
    _risen(run, "epoch", sink.lent[0], epoch, "KVP-EPO-RISE")
    run.hand_over(sink)


@scenario("LIVE-1613", "a sink that cannot give memory back loses its session, and is served in another",
          "KVP-EPO-FREE", guards=_POOL, extensions=("PULL", "SLEEP"))  # fmt: skip
def _ended(run: PrefillRun) -> None:
    sink = _lent(run)
    sink.expect("Goodbye", clause="KVP-EPO-FREE")
    sink.close()
    run.check("free", _free(run), "no session reads it, and it is not free", "KVP-EPO-FREE")
    _wake(run)
    run.serve_fresh()


def _risen(run: Run, what: str, later: str, before: str, clause: str) -> None:
    """Check that a number has risen."""
    run.check(what, int(later) > int(before), f"{later} after {before}", clause)


@scenario("LIVE-1614", "a draft is loaded meanwhile: sessions with EPOCHS are told, and others end", "KVP-DSC-AGAIN",
          "KVP-DSC-VERSION", guards=_CACHES, world="latent", extensions=_BOTH, spoils=True)  # fmt: skip
def _loaded(run: PrefillRun) -> None:
    told, other, bare = run.ready(offered=["EPOCHS"]), run.ready(), run.sink(offered=["EPOCHS"])
    bare.greet()
    version = told.their_version
    run.engine.ask("sleep")
    _wake(run, "mla")
    told.described_again()
    _risen(run, "version", told.their_version, version, "KVP-DSC-VERSION")
    told.move()
    run.hand_over(told)
    other.expect("Goodbye", clause="KVP-DSC-AGAIN")
    other.over()
    late = bare.silence(0.2)
    run.check("nothing to tell", not late, str([frame.name for frame in late]), "KVP-DSC-AGAIN")
    bare.describe(bare.geometry or {})
    _risen(run, "version", bare.their_version, version, "KVP-DSC-VERSION")
    bare.allocate()
    bare.register()
    run.hand_over(bare)
    run.serve_fresh()


@scenario("LIVE-1621", "a fetch that waits is lost by POOL_MOVED, and the session goes on", "KVP-EPO-MOVED",
          "KVP-EPO-FREE", role="sink", guards=_POOL, extensions=_BOTH)  # fmt: skip
def _loses(run: DecodeRun) -> None:
    run.engine.ask("move")  # to memory that nobody of the scenarios before may still write
    source, prompt = run.one(offered=["EPOCHS"]), run.prompt()
    run.chosen(source)
    run.hand_over([source])
    run.fetch(source, prompt)
    run.asked(source, prompt)
    run.engine.ask("sleep")
    back = source.expect("Unregister", clause="KVP-EPO-MOVED")
    run.check("at once", bool(back.fields.get("at_once")), "nobody says that it hurries", "KVP-EPO-MOVED")
    _drain(source)
    run.check("not free yet", not _free(run, 0.2), "free, though a source maps it", "KVP-EPO-FREE")
    source.give_up(back)
    for _ in range(_OFTEN):
        _drain(source)
        if free := _free(run, 0.1):
            break
    run.check("free", free, "Unregistered with PROVEN, and not free", "KVP-EPO-FREE")
    run.lost(prompt, "POOL_MOVED")
    _wake(run)
    _risen(run, "epoch", source.registered().fields["epoch"], back.fields["epoch"], "KVP-EPO-RISE")
    run.hand_over([source])


@scenario("LIVE-1622", "without EPOCHS the session ends, and another is opened once there is memory", "KVP-EPO-FREE",
          role="sink", guards=_POOL, extensions=("SLEEP",))  # fmt: skip
def _reopened(run: DecodeRun) -> None:
    source = run.one()
    run.hand_over([source])
    run.engine.ask("sleep")
    source.expect("Goodbye", clause="KVP-EPO-FREE")
    source.unmap()
    source.over()
    _wake(run)
    source.welcome()
    source.describe()
    source.registered()
    run.hand_over([source])


@scenario("LIVE-1623", "a draft is dropped meanwhile: the source is told, and fetches go on", "KVP-DSC-AGAIN",
          "KVP-DSC-VERSION", role="sink", guards=_CACHES, world="mla", extensions=_BOTH, spoils=True)  # fmt: skip
def _dropped(run: DecodeRun) -> None:
    source = run.one(offered=["EPOCHS"])
    run.chosen(source)
    version = source.their_version
    run.hand_over([source])
    run.engine.ask("sleep")
    back = source.expect("Unregister", clause="KVP-EPO-MOVED")
    source.give_up(back)
    _wake(run, "latent")
    source.describe()
    _risen(run, "version", source.their_version, version, "KVP-DSC-VERSION")
    source.registered()
    run.hand_over([source])
