"""Registration: this side's memory as its peers see it, and the mapping of a peer's memory."""

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError, RemoteError
from kvproto.options import Options
from kvproto.session import Registration
from kvproto.session.descriptions import Described
from kvproto.transport.base import Connection, Mapped, Memory, Move, PeerRegions, StreamDelivery, Transport
from kvproto.wire.enums import ErrorCode, Feature
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region, Register


def features_of(transports: Sequence[Transport], options: Options) -> tuple[Feature, ...]:
    """The features that a side offers, ascending: its transports' features, and the choices of its engine."""
    offered = {Feature.EPOCHS} | {feature for transport in transports for feature in transport.capabilities.features}
    chosen = {
        Feature.VERIFY: bool(options.verify),
        Feature.VERIFY_PAGES: options.verify == "pages",
        Feature.PULL: options.pull,
        Feature.COLD_DRAFT: options.cold_draft,
        Feature.CONVERT: any(transport.capabilities.converts for transport in transports),
        Feature.FEW_SOURCES: options.spread == "few",
        Feature.SPREAD_ONE: options.spread == "one",
        Feature.INTENT: True,
        Feature.SPANS: True,
    }
    return tuple(sorted(offered | {feature for feature, chosen_here in chosen.items() if chosen_here}))


def register(
    transports: Sequence[Transport], memories: Mapping[int, Memory], program: CopyProgram, runs: Callable[[], Runs]
) -> tuple[Registration, dict[int, StreamDelivery]]:
    """Expose every region by each transport; the registration, and deliveries of packed bytes; raises NO_TRANSPORT."""
    handles: dict[int, list[Handle]] = {id: [] for id in memories}
    staging: list[Region] = []
    packed: dict[int, StreamDelivery] = {}
    for transport in transports:
        exposed = transport.expose(memories, max(memories, default=-1) + 1 + len(staging), program, runs)
        for id, exposed_handles in exposed.handles.items():
            handles[id] += exposed_handles
        staging += exposed.regions
        if exposed.packed is not None:
            packed[transport.capabilities.code] = exposed.packed
    regions = [attrs.evolve(memory.region, id=id, handles=tuple(handles[id])) for id, memory in memories.items()]
    return Registration((*regions, *staging), {code: delivery.receiver for code, delivery in packed.items()}), packed


@attrs.define(eq=False)
class PeerMapping:
    """The memory of one session's peer, mapped here."""

    register: Register = attrs.field(repr=False)
    """The memory that the peer has registered: a sink's to write, or a source's to read."""
    described: Described = attrs.field(repr=False)
    """The Descriptions and the plan of its transfers."""
    transport: Transport
    pair: Pair
    connection: Connection = attrs.field(factory=Connection)
    reads: bool = False
    """Whether the peer reads our memory, so that nothing of its own is mapped."""
    packed: bool = attrs.field(init=False)
    """Whether bytes are packed, because the peer's pages cannot be written directly."""

    def __attrs_post_init__(self) -> None:
        self.packed = self.connection.link is not None

    @property
    def key(self) -> tuple[int, int]:
        """The session and epoch that the memory is registered under."""
        return self.register.session, self.register.epoch

    def prepare(self, own: Mapping[int, Memory], writes: bool) -> None:
        """Let the transport prepare for copies from this side's memory if `writes`, otherwise into it."""
        sides: tuple[Mapping[int, Memory | Mapped], Mapping[int, Memory | Mapped]] = own, self.connection.mapped
        self.transport.prepare(Move(self.pair.nothing, *(sides if writes else sides[::-1])))


def map_peer(
    message: Register,
    described: Described,
    transports: Sequence[Transport],
    pair: Pair,
    own: Mapping[int, Memory] | None,
    attestation: bytes,
    writes: bool,
    features: Collection[int] = (),
) -> PeerMapping:
    """Map every region that a column names, with the first transport in the owner's order that works here.

    `own` is this side's memory, for the transport to prepare (None: there is none yet). `attestation` is what the owner
    has to have written. `writes` states whether this side writes or reads, and `features` are the session's. Raises the
    error of the last transport that was tried, or NO_TRANSPORT if the sides have none in common.
    """
    by_code = {int(transport.capabilities.code): transport for transport in transports}
    named = {region for columns in message.columns for region in columns.region.tolist()}
    offered = [handle.transport for handle in message.regions[0].handles] if message.regions else []
    error: KvprotoError = RemoteError(
        ErrorCode.NO_TRANSPORT, "regions[0].handles", _names(by_code), _names(offered), "use a common transport"
    )
    for transport in (by_code[code] for code in offered if code in by_code):
        mapping = None
        try:
            if pair.nothing.operations.converts and not transport.capabilities.converts:
                mine, yours = "a transport that converts", transport.capabilities.code.name
                advice = (
                    "offer a transport that converts, too (docs/how-to/conversion.md), or keep one dtype on both sides"
                )
                raise RemoteError(ErrorCode.NO_TRANSPORT, "regions[0].handles", mine, yours, advice)
            connection = transport.connect(PeerRegions(message.regions, named, writes, features, attestation))
            mapping = PeerMapping(message, described, transport, pair, connection)
            if own is not None:
                mapping.prepare(own, writes)
        except KvprotoError as failure:
            error = failure.kept()
            if mapping is not None:
                mapping.connection.close()
            continue
        return mapping
    raise error


def _names(codes: object) -> str:
    names = {int(code): code.name for code in TransportCode}
    assert isinstance(codes, list | dict)
    return ", ".join(names.get(int(code), f"0x{int(code):04x}") for code in codes) or "none"
