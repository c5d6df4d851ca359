"""Addresses and Descriptions over which a sink opens no session: unsafe ones, and ones with which it cannot plan."""

from __future__ import annotations

import copy
import os
import secrets
import tempfile
from collections.abc import Callable
from typing import Any

from kvproto_conformance.live import world
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.scenario import scenario
from kvproto_conformance.live.source import Source
from kvproto_conformance.live.wire import free_address

Json = dict[str, Any]
_ANYBODY = "Anybody on the network may be the source."
_ANY_USER = "Any user of the machine may be the source."
_UNFIT = "Two sides that do not fit wait for each other: requests hang until their deadline, and nothing says why."


def _unsafe(mode: int, at: Callable[[str], str]) -> Any:
    def script(run: DecodeRun) -> None:
        """Whether `connect` is refused, or nothing comes of it, is the engine's affair."""
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, mode)
            address, geometry = at(folder), world.mirror(run.live.geometry)
            source = Source(address, name="unsafe", geometry=geometry, transport=run.transport)
            run.peers.append(source)
            run.engine.answer("connect", engine=source.name, address=address)
            run.engine.answer(
                "fetch", id="unsafe", key="00" * 16, engine=source.name, deadline=60_000, tokens=[1], first=0
            )
            heard = [frame.name for frame in source.silence(0.3)]
            run.check("no word", not heard, str(heard), "KVP-NET-INSECURE")

    return script


for _id, _title, _guards, _mode, _at in (
    ("LIVE-885", "a source in a folder that others may enter", _ANY_USER, 0o755, lambda folder: f"ipc://{folder}/source"),
    ("LIVE-886", "a source over TCP without keys", _ANYBODY, 0o700, lambda folder: free_address()),
    ("LIVE-931", "a source in a folder of its group", _ANY_USER, 0o770, lambda folder: f"ipc://{folder}/source"),
    ("LIVE-932", "a source at a name without a file", _ANY_USER, 0o700, lambda folder: f"ipc://@{secrets.token_hex(8)}"),
):  # fmt: skip
    scenario(_id, f"{_title} hears nothing", "KVP-NET-INSECURE", role="sink", guards=_guards, level="L4",
             spoils=True)(_unsafe(_mode, _at))  # fmt: skip


@scenario("LIVE-933", "a Welcome that says another rank listens over TCP without keys", "KVP-NET-INSECURE",
          role="sink", guards=_ANYBODY, level="L4")  # fmt: skip
def _unsafe_endpoint(run: DecodeRun) -> None:
    """Messages that wait may be lost; nothing is said to that rank."""
    first, second = run.source(2)
    second.wire.close()
    addresses = first.endpoints | {1: free_address()}
    unsafe = Source(addresses[1], name=first.name, geometry=first.geometry, rank=1, transport=run.transport)
    first.endpoints = addresses
    run.peers[1] = unsafe
    run.connect(first)
    run.fetch(first, run.prompt())
    first.welcome()
    first.describe()
    first.silence(0.3)
    heard = [frame.name for frame in unsafe.silence(0.1)]
    run.check("no word", not heard, str(heard), "KVP-NET-INSECURE")
    first.session = ""


@scenario("LIVE-934", "a source that takes no body as long as Register", "KVP-FRAME-W-LENGTH", role="sink", level="L4",
          guards="A message that its reader has not the room for ends the connection.")  # fmt: skip
def _short_bodies(run: DecodeRun) -> None:
    """The lengths that the engine's messages have are those that another source has seen; grease may make them vary."""
    before = run.one()
    lengths = [len(before.last_heard[name].raw) - 16 for name in ("Describe", "Register")]
    source = run.connected()
    source.welcome(limits={"max_body": str(max(lengths) - 32), "max_transfers": "64"})
    for name, answer in (("Describe", source.describe), ("Register", source.registered)):
        if name not in [frame.name for frame in source.silence(0.3, but=(name,))] and not source.heard:
            break
        answer()
    run.check("one was not sent", source.watch.state != "ready", source.watch.state, "KVP-FRAME-W-LENGTH")
    source.session = ""


def _half(geometry: Json) -> None:
    lanes = geometry["ranks"][0]["owns"][0]["lanes"][0]
    lanes["hi"] = str(int(lanes["hi"]) // 2)


def _dtype(geometry: Json) -> None:
    part = geometry["groups"][0]["parts"][0]
    part["dtype"] = "F16" if part["dtype"] != "F16" else "BF16"


def _unstated(geometry: Json) -> None:
    geometry["ranks"][0]["owns"][-1]["group"] = "99"


def _described(change: Callable[[Json], None], code: str, inside: bool) -> Any:
    def script(run: DecodeRun) -> None:
        """It is refused by Error, or Goodbye alone; what waits for the session is lost."""
        (source,), prompt = run.source(), run.prompt()
        run.connect(source)
        run.fetch(source, prompt)
        source.welcome()
        geometry = copy.deepcopy(source.geometry)
        change(geometry)
        data, digest = world.digest_of(geometry)
        source.describe(geometry=data, digest=digest)
        run.lost(prompt, "PEER_LOST", code)
        heard = source.silence(0.1)
        names = [frame.name for frame in heard]
        run.check("no Register", "Register" not in names, str(names), "KVP-DSC-BOTH")
        run.check("Error or Goodbye", bool({"Error", "Goodbye"} & {*names}), str(names), "KVP-ERR-REPORT")
        errors = [frame.fields for frame in heard if frame.name == "Error"]
        good = all(e["code"] == code and e["path"].startswith("geometry.") == inside for e in errors)
        run.check("code and path", good, str(errors), "KVP-DSC-PATH" if inside else "KVP-ERR-REPORT")
        source.session = ""

    return script


for _id, _title, _change, _code, _clause, _inside in (
    ("LIVE-935", "of a rank with half of the heads", _half, "COVERAGE", "KVP-PLAN-COVER", False),
    ("LIVE-936", "whose K is of another type", _dtype, "DTYPE_MISMATCH", "KVP-PLAN-FIT", False),
    ("LIVE-937", "with a share of a group that is not stated", _unstated, "BAD_GEOMETRY", "KVP-GEO-GROUP", True),
):  # fmt: skip
    scenario(_id, f"a Description {_title}", _clause, "KVP-DSC-PATH", role="sink", guards=_UNFIT,
             level="L4")(_described(_change, _code, _inside))  # fmt: skip


@scenario("LIVE-938", "of three ranks two contradict each other, and the first has changed", "KVP-DSC-RANKS",
          role="sink", level="L4",
          guards="Ranks of one fleet have different page sizes, and requests wait until their deadline.")  # fmt: skip
def _two_of_three(run: DecodeRun) -> None:
    """The rank that was greeted first states version 2, with which nothing is compared."""
    first, second, third = run.source(3)
    first.version = "2"
    pages, *others = third.geometry["groups"]
    third.geometry = third.geometry | {"groups": [pages | {"rows": str(2 * int(pages["rows"]))}, *others]}
    run.connect(first)
    first.welcome()
    first.describe()
    for source in (second, third):
        source.welcome()
    prompt = run.prompt()
    run.fetch(first, prompt)
    second.describe()
    second.ask("Ping", "Pong")
    id = third.describe().fields["request"]
    found = third.expect("Error", where=lambda f: f.get("request") == id, clause="KVP-DSC-RANKS").fields
    run.check("code", found["code"] == "DESCRIPTION_MISMATCH", found["code"], "KVP-DSC-RANKS")
    third.expect("Goodbye", clause="KVP-DSC-RANKS")
    run.lost(prompt, "DESCRIPTION_MISMATCH", "PEER_LOST")
    for source in (first, second, third):
        source.session = ""
