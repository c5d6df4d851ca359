"""Which transport reaches a peer's memory, and what is said where none does."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvproto.errors import KvprotoError, RemoteError
from kvproto.options import Options
from kvproto.rank.registration import features_of, map_peer, register
from kvproto.session.descriptions import Described
from kvproto.transport.base import Capabilities, Connection, Exposure, Move, PeerRegions, Transport
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode, Feature, MemoryKind
from kvproto.wire.enums import Transport as Code
from kvproto.wire.messages import Handle, Region, Register
from tests.errors import raises
from tests.node.stages import ATTESTATION, Stage, able


class Named(ShmTransport):
    """Shared memory under the name of another transport, which may fail at any step."""

    def __init__(self, code: Code, fails: str = "", extra: int = 0) -> None:
        self.capabilities: Capabilities = attrs.evolve(ShmTransport.capabilities, code=code)
        self._fails, self._extra = fails, extra
        self.connected: list[Connection] = []
        self.next_ids: list[int] = []

    def expose(self, memory: Any, next_id: int, program: Any, runs: Callable[[], Any]) -> Exposure:
        self.next_ids.append(next_id)
        handles = {i: tuple(self._renamed(h) for h in m.region.handles) for i, m in memory.items()}
        more = tuple(
            Region(
                id=next_id + n, base=0, length=8, kind=MemoryKind.HOST, boot=bytes(16),
                handles=(Handle(transport=self.capabilities.code, data=b"x"),),
            )
            for n in range(self._extra)
        )  # fmt: skip
        return Exposure(handles, more)

    def _renamed(self, handle: Handle) -> Handle:
        return attrs.evolve(handle, transport=self.capabilities.code)

    def connect(self, peer: PeerRegions) -> Connection:
        if self._fails == "connect":
            raise RemoteError(ErrorCode.TRANSPORT_FAILED, "regions[0]", "no way", self.capabilities.code.name)
        code = self.capabilities.code
        shm = [
            attrs.evolve(
                r,
                handles=tuple(
                    attrs.evolve(h, transport=Code.SHM) for h in r.handles if h.transport == code
                ),
            )
            for r in peer.regions
        ]  # fmt: skip
        self.connected.append(super().connect(attrs.evolve(peer, regions=shm)))
        return self.connected[-1]

    def prepare(self, move: Move) -> None:
        if self._fails == "prepare":
            raise RemoteError(ErrorCode.TRANSPORT_FAILED, "regions[0]", "no kernel", self.capabilities.code.name)


def reach(stage: Stage, asked: tuple[Register, Described], *transports: Transport) -> Transport:
    made = map_peer(*asked, transports, stage.pair, stage.source.memories, ATTESTATION, writes=True)
    assert sorted(made.connection.mapped) == [0]
    made.connection.close()
    assert not made.connection.mapped
    return made.transport


def test_the_owners_order_decides(stage: Stage) -> None:
    shm, cuda, nixl = (Named(code) for code in (Code.SHM, Code.CUDA, Code.NIXL))
    asked = stage.asked([cuda, shm])
    assert reach(stage, asked, shm, cuda) is cuda
    assert reach(stage, asked, nixl, shm) is shm


@pytest.mark.parametrize("fails", ["connect", "prepare"])
def test_the_next_transport_is_tried_where_one_fails(stage: Stage, fails: str) -> None:
    """And nothing of the first stays mapped."""
    wrong, shm = Named(Code.CUDA, fails), Named(Code.SHM)
    assert reach(stage, stage.asked([wrong, shm]), wrong, shm) is shm
    assert not any(connection.mapped for connection in wrong.connected)


def test_why_the_last_did_not_work_is_told(stage: Stage) -> None:
    wrong = [Named(Code.CUDA, "connect"), Named(Code.SHM, "prepare")]
    with raises(KvprotoError, code=ErrorCode.TRANSPORT_FAILED, path="regions[0]", mine="no kernel"):
        map_peer(*stage.asked(wrong), wrong, stage.pair, stage.source.memories, ATTESTATION, writes=True)


def test_no_common_transport_says_what_each_side_has(stage: Stage) -> None:
    asked = stage.asked([Named(Code.CUDA), Named(Code.NIXL)])
    ours = {"path": "regions[0].handles", "mine": "SHM", "yours": "CUDA, NIXL", "advice": "use a common transport"}
    with raises(RemoteError, code=ErrorCode.NO_TRANSPORT, **ours):
        map_peer(*asked, [ShmTransport()], stage.pair, stage.source.memories, ATTESTATION, writes=True)


def test_every_transport_exposes_every_region_and_ids_of_more_do_not_meet(stage: Stage) -> None:
    """A region has one id."""
    first, second = Named(Code.NIXL, extra=2), Named(Code.SHM, extra=1)
    made, packed = register([first, second], stage.sink.memories, stage.pair.nothing, stage.pair.nothing.runs)
    assert [region.id for region in made.regions] == [0, 1, 2, 3]
    assert [h.transport for h in made.regions[0].handles] == [Code.NIXL, Code.SHM]
    assert (first.next_ids, second.next_ids) == ([1], [3])
    assert (packed, made.readers) == ({}, {})


def test_features_are_those_of_the_transports_and_of_the_options() -> None:
    staged = able(ShmTransport(), features=(Feature.STAGED,))
    always = {Feature.EPOCHS, Feature.INTENT, Feature.SPANS}
    assert set(features_of([ShmTransport()], Options(verify=False))) == {Feature.CONVERT, *always}
    assert set(features_of([staged, staged], Options(pull=True))) == {
        Feature.STAGED,
        Feature.VERIFY,
        Feature.PULL,
        Feature.CONVERT,
        *always,
    }
    assert set(features_of([], Options(verify="pages"))) == {Feature.VERIFY, Feature.VERIFY_PAGES, *always}
