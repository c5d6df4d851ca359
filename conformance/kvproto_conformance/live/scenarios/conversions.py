"""Extension CONVERT, in both roles and both directions: what is not asked for is refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvproto_conformance.live import forms, world
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.peer import Missed, Peer
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.scenario import scenario

Json = dict[str, Any]
_CAST = "BF16 becomes FP8 by a cast of the framework, by the scale of another head, or by none: fluent, and wrong."
_SILENT = "Two dtypes are paired because they have as many bytes, or because one side alone was told to convert."
_OFFERED = ("CONVERT", "VERIFY")
# world of the engine, conversion, transport
PAIRS = [
    ("bf16", "e4m3_tensor", "SHM"), ("bf16", "e4m3_block", "SHM"), ("fp8_tensor", "e4m3_tensor", "SHM"),
    ("fp8_block", "e4m3_block", "SHM"), ("bf16", "e4m3_block", "INLINE"), ("fp8_block", "e4m3_block", "INLINE"),
]  # fmt: skip


def _chosen(peer: Peer) -> None:
    if "CONVERT" not in peer.watch.features:
        raise Missed("CONVERT is claimed, was offered, and was not chosen", "KVP-NEG-CHOOSE")


def _other(run: PrefillRun | DecodeRun, conversion: str, ranks: int = 1) -> Json:
    """A Description in the other form."""
    return world.mirror(forms.other(run.live.geometry, conversion), ranks)


def _sends(run: PrefillRun, conversion: str) -> None:
    """Two requests over one session, whose bytes are what the formulas make of those of the engine."""
    sink = run.ready(geometry=_other(run, conversion), offered=_OFFERED)
    _chosen(sink)
    run.hand_over(sink)
    run.hand_over(sink, run.prompt(17))


def _takes(run: DecodeRun, conversion: str) -> None:
    """Two fetches from two ranks, which send half of the heads each, in the engine's form."""
    sources = run.ready(2, geometry=_other(run, conversion, 2), offered=_OFFERED)
    _chosen(sources[0])
    run.hand_over(sources)
    run.hand_over(sources, run.prompt(17))


for _number, (_world, _conversion, _transport) in enumerate(PAIRS):
    _more = ("CONVERSION", "INLINE") if _transport == "INLINE" else ("CONVERSION",)
    _says = f"{_world} over {_transport}, of which the other side is in the other form of {_conversion}"
    scenario(
        f"LIVE-{1661 + _number}", f"two requests of {_says}, every byte by the formulas", "KVP-CNV-EXACT",
        "KVP-CNV-PLAN", "KVP-CNV-VERIFY", guards=_CAST, world=_world, transport=_transport, extensions=_more,
    )(partial(_sends, conversion=_conversion))  # fmt: skip
    scenario(
        f"LIVE-{1671 + _number}", f"two fetches of {_says}, every byte as attention reads it", "KVP-CNV-PLAN",
        guards=_CAST, role="sink", world=_world, transport=_transport, extensions=_more,
    )(partial(_takes, conversion=_conversion))  # fmt: skip


def _refused(run: PrefillRun, geometry: Json, offered: tuple[str, ...]) -> None:
    sink = run.sink(offered=offered)
    sink.greet()
    data, digest = world.digest_of(geometry)
    sent = sink.send("Describe", request=sink.next_id(), version="1", geometry=data, digest=digest)
    group = geometry["groups"][0]  # the engine may have names of its own
    path = f"groups[{group['name']}].parts[{group['parts'][0]['name']}].dtype"
    run.refused(sink, sent.fields["request"], "Refused", "DTYPE_MISMATCH", path, "KVP-CNV-BOTH")


@scenario("LIVE-1681", "a sink in FP8 that does not offer CONVERT is refused", "KVP-CNV-BOTH", guards=_SILENT,
          world="bf16", extensions=("CONVERSION",))  # fmt: skip
def _not_offered(run: PrefillRun) -> None:
    _refused(run, _other(run, "e4m3_block"), ("VERIFY",))
    run.probe()


@scenario("LIVE-1682", "a sink in FP8 that states another conversion than the engine, or none, is refused",
          "KVP-CNV-BOTH", guards=_SILENT, world="fp8_block", extensions=("CONVERSION",))  # fmt: skip
def _not_stated(run: PrefillRun) -> None:
    _refused(run, forms.unstated(_other(run, "e4m3_block")), _OFFERED)
    _refused(run, _other(run, "e4m3_tensor"), _OFFERED)
    run.probe()


@scenario("LIVE-1683", "a sink in another dtype that states conversions, of which the engine states none",
          "KVP-PLAN-FIT", "KVP-CNV-BOTH", guards=_SILENT)  # fmt: skip
def _alone(run: PrefillRun) -> None:
    """Of any engine: one that knows no conversions skips the fields, and plans as ever."""
    _refused(run, world.mirror(forms.restated(run.live.geometry)), _OFFERED)
    run.probe()


def _gives_up(run: DecodeRun, geometry: Json, offered: tuple[str, ...]) -> None:
    """A source that answers with a Description of another dtype: nothing is asked of it, and the fetch says why."""
    source, prompt = run.connected(geometry=geometry, offered=offered), run.prompt()
    run.fetch(source, prompt)
    source.welcome()
    sent = source.expect("Describe", clause="KVP-DSC-BOTH")
    data, digest = world.digest_of(source.geometry)
    source.reply(sent, "Description", version="1", geometry=data, digest=digest)
    source.expect("Goodbye", seconds=6.0, clause="KVP-CNV-BOTH")
    source.session = ""
    run.lost(prompt, "DTYPE_MISMATCH")


@scenario("LIVE-1691", "a source in another dtype that states conversions, of which the engine states none",
          "KVP-PLAN-FIT", "KVP-CNV-BOTH", guards=_SILENT, role="sink")  # fmt: skip
def _alone_at_a_sink(run: DecodeRun) -> None:
    _gives_up(run, world.mirror(forms.restated(run.live.geometry)), _OFFERED)
    run.probe()


@scenario("LIVE-1692", "a source in the other form that does not offer CONVERT", "KVP-CNV-BOTH", guards=_SILENT,
          role="sink", world="fp8_block", extensions=("CONVERSION",))  # fmt: skip
def _not_offered_to_a_sink(run: DecodeRun) -> None:
    _gives_up(run, _other(run, "e4m3_block"), ("VERIFY",))
    run.probe()
