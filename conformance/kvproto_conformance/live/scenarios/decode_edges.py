"""Edges of a sink: two faults in one message, a feature that it needs, deadlines, and its own proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto_conformance.codec.facts import MESSAGES
from kvproto_conformance.live import world
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.scenarios.decode_ends import aborted
from kvproto_conformance.live.source import Source

Json = dict[str, Any]
_BELIEVED = "A session that only one side believes in: requests wait in it for ever."
_TWO = "Two engines name two faults of one message, and nobody finds the first."
_WAITS = "A request waits for ever for a source that cannot be asked."
_COSTS = "One Credit too many costs every request of the session."
_KEPT = "Pages that nobody writes any more are never used again."


def _faulty(wrong: Callable[[Source], Any], code: str, path: str) -> Any:
    def script(run: DecodeRun) -> None:
        """Two things are wrong: what is said, if anything, is the first."""
        (source,), prompt = run.source(), run.prompt()
        run.connect(source)
        run.fetch(source, prompt)
        wrong(source)
        run.lost(prompt, "PEER_LOST", code)
        errors = [f.fields for f in source.silence(0.1) if f.name == "Error"]  # or Goodbye alone
        good = all((error["code"], error["path"]) == (code, path) for error in errors)
        run.check("the first fault", good, str(errors), "KVP-ERR-REPORT")
        source.session = ""

    return script


def _welcome(source: Source) -> None:
    source.welcome(version={"major": "1", "minor": "9"}, engine="another", features=[{"unknown": "28673"}])


def _description(source: Source) -> None:
    source.welcome()
    geometry = source.geometry | {"groups": source.geometry["groups"][:-1]}  # its ranks own a group that is not stated
    source.describe(geometry=world.digest_of(geometry)[0], digest="66" * 32)


def _registered(source: Source) -> None:
    source.welcome()
    source.describe()
    source.registered(epoch="7", plan="77" * 32, routes=source.routes()[:1])


for _id, _title, _wrong, _code, _path, _clause in (
    ("LIVE-942", "a Welcome of another version, engine and feature", _welcome, "FEATURE_MISSING", "version",
     "KVP-NEG-CHECK"),
    ("LIVE-943", "a Description with another digest, of a geometry that contradicts itself", _description,
     "BAD_DIGEST", "digest", "KVP-DSC-DIGEST"),
    ("LIVE-944", "a Registered of another epoch, plan and routes", _registered, "OUT_OF_RANGE", "epoch",
     "KVP-REG-CHECK"),
):  # fmt: skip
    scenario(_id, _title, _clause, role="sink", level="L4", guards=_TWO)(_faulty(_wrong, _code, _path))


@scenario("LIVE-945", "a Welcome without the feature that the engine needs", "KVP-NEG-CHECK", role="sink", level="L4",
          guards=_BELIEVED, transport="INLINE", extensions=("INLINE",))  # fmt: skip
def _needed(run: DecodeRun) -> None:
    """Whether it needs INLINE, which is the only transport that it was opened with, is what its Hello says."""
    (source,), prompt = run.source(), run.prompt()
    run.connect(source)
    run.fetch(source, prompt)
    hello = source.welcome(features=[])
    heard = [frame.name for frame in source.silence(0.3)]
    if "INLINE" in hello.fields["needed"]:
        run.check("no Describe", "Describe" not in heard, str(heard), "KVP-NEG-CHECK")
        run.lost(prompt, "PEER_LOST", "FEATURE_MISSING")
    source.session = ""


@scenario("LIVE-947", "nothing is proven of the one transfer that a source takes at a time: the next is requested",
          "KVP-TRN-SEQUENCE", role="sink", level="L4",
          guards="One transfer that proved nothing blocks its session for good.")  # fmt: skip
def _unproven(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome(limits={"max_body": str(1 << 24), "max_transfers": "1"})
    source.describe()
    source.registered()
    first, second = run.fetched(source), run.prompt()
    run.asked(source, first)
    source.reply(aborted(run, source, first), "Drained", proof="UNPROVABLE")
    run.lost(first, "ABORTED", free=False)
    run.fetch(source, second)
    run.delivered(source, run.asked(source, second), second)


@scenario("LIVE-948", "the deadline passes before a source can be asked, and before it has answered",
          "KVP-TRN-ENDLESS", role="sink", level="L4", slow=True, guards=_WAITS)  # fmt: skip
def _never_asked(run: DecodeRun) -> None:
    (deaf,), unheard = run.source(), run.prompt()
    run.connect(deaf)
    run.fetch(deaf, unheard, deadline=1000)
    source, unanswered = run.one(), run.prompt()
    run.fetch(source, unanswered, deadline=1000)
    source.asked()
    source.reply(source.expect("Abort", clause="KVP-TRN-ENDLESS"), "Drained", proof="PROVEN")
    run.lost(unheard, "DEADLINE")
    run.lost(unanswered, "DEADLINE")


@scenario("LIVE-949", "Data and Done of a transfer whose Accepted was lost", "KVP-INL-ASKED", role="sink", level="L4",
          guards="One lost reply costs a request whose bytes are all there.", transport="INLINE",
          extensions=("INLINE",))  # fmt: skip
def _unaccepted(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    source.watch.transfers[asked.of["sequence"]] = "accepted"  # as far as the suite's side knows
    run.delivered(source, asked, prompt)


@scenario("LIVE-950", "the source has refused a Credit: streams go on with the total of before", "KVP-ERR-ALONE",
          role="sink", level="L4", guards=_COSTS, transport="INLINE", extensions=("INLINE",))  # fmt: skip
def _no_credit(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    about = str(MESSAGES["Credit"].number)
    source.send("Error", session=source.session, code="CREDIT", path="total", mine="8", yours="9", about=about)
    heard = [frame.name for frame in source.silence(0.1)]
    run.check("the session goes on", not {"Goodbye", "Abort", "Error"} & {*heard}, str(heard), "KVP-ERR-ALONE")
    run.delivered(source, asked, prompt)


@scenario("LIVE-951", "a session ends amid a stream: what only the sink itself writes is free", "KVP-STG-OWN",
          role="sink", level="L4", guards=_KEPT, must=False, transport="INLINE", extensions=("INLINE",))  # fmt: skip
def _own_proof(run: DecodeRun) -> None:
    source, prompt, asked = run.begun()
    raw = source.packed(asked, prompt.seed)
    source.take_credit(len(raw))
    source.data(asked, 0, raw[: len(raw) // 2], False)
    source.goodbye()
    run.lost(prompt, "PEER_LOST")
    source.over()
