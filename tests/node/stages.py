"""A rank pair in one process, for tests of one part of a node at a time."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from kvproto import Pool
from kvproto.copying.lowering import Pair
from kvproto.planning.plan import plan
from kvproto.rank.registration import PeerMapping, map_peer, register
from kvproto.session.descriptions import Described, Stated
from kvproto.session.records import SourceAttempt
from kvproto.session.table import TransferState
from kvproto.source.prefill import Computed, Prefill
from kvproto.source.schedule import Send
from kvproto.transport.base import Transport
from kvproto.transport.process import attestations
from kvproto.wire.enums import Access
from kvproto.wire.messages import Register, Transfer
from tests.node.nodes import grants
from tests.pools import allocate
from tests.session.driver import geometry

ITEMS, TOKENS, KEY = {0: 12, 1: 12}, 11, b"k" * 16
ATTESTATION = b"a" * 32
HERE, THERE = [1, 2, 3], [7, 8, 9]
LAYER = 40 * TOKENS
"""Bytes of a layer of the target."""


class Stage:
    """A source's pool, a sink's, and what lies between."""

    def __init__(self) -> None:
        self.source, self.sink = (allocate(geometry(1), 0, ITEMS) for _ in range(2))
        routes = plan(geometry(1), geometry(1)).between(0, 0)
        self.pair = Pair(routes, self.source.layout, self.sink.layout)
        attestations.add(ATTESTATION)

    def asked(self, transports: Sequence[Transport]) -> tuple[Register, Described]:
        """What the sink registers."""
        return registered(self.sink, transports, self.pair)

    def peer(self, transport: Transport) -> PeerMapping:
        """The sink as the source reaches it."""
        asked = self.asked([transport])
        return map_peer(*asked, [transport], self.pair, self.source.memories, ATTESTATION, writes=True)

    def send(self, peer: PeerMapping, sequence: int = 1, first: int = 0, prefill: Prefill | None = None) -> Send:
        """A transfer that the sink asks for, and what is computed for it."""
        made = grants(self.sink, dict.fromkeys((0, 1), THERE), first, TOKENS)
        transfer = Transfer(
            session=1, request=sequence, sequence=sequence, epoch=1, ticket=KEY, content=b"c" * 32, source_version=1,
            sink_version=1,
            grants=tuple(made.values()), writers=np.array([0]),
        )  # fmt: skip
        session: Any = SimpleNamespace(session=1, open=True)
        attempt = SourceAttempt(
            sequence, TransferState.ACCEPTED, session=session, transfer=transfer, granted=transfer.grants
        )
        request: Any = SimpleNamespace(over=None)
        return Send(request, prefill or Prefill(), attempt, peer, attempt.granted)


def registered(pool: Pool, transports: Sequence[Transport], pair: Pair) -> tuple[Register, Described]:
    made, _ = register(transports, pool.memories, pair.nothing, pair.nothing.runs)
    message = Register(
        session=1, request=1, source=bytes(32), sink=bytes(32), epoch=1, access=Access.WRITE, regions=made.regions,
        columns=tuple(pool.layout.columns.values()), plan=bytes(32), routes=(),
    )  # fmt: skip
    stated = Stated.of(geometry(1))
    return message, Described(stated, stated, plan(geometry(1), geometry(1)), (0, 0))


def tables(pages: Sequence[int] = HERE) -> dict[int, Any]:
    return {group: np.array(pages) for group in (0, 1)}


def computed(tokens: int, layers: tuple[int, int], model: int = 0, **more: Any) -> Computed:
    return Computed(tables(), tokens, layers, model, **more)


def able(transport: Transport, **capabilities: Any) -> Transport:
    """The same, with other capabilities."""
    transport.capabilities = attrs.evolve(transport.capabilities, **capabilities)
    return transport
