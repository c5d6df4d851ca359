"""Descriptions and registration: what each side states, and what the other makes of it."""

import hashlib
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.planning.geometry import encode_geometry, mla
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.session.table import SessionState
from kvproto.wire import decode, encode
from kvproto.wire.enums import Access, DType, ErrorCode, Transport
from kvproto.wire.messages import Describe, Description, Error, Ping, Pong, Refused, Register, Registered, Transfer
from tests.session.driver import World, geometry, ticket
from tests.session.test_delivery import Heard


class Watched(World):
    """A world that changes messages on their way, keeps all of them, and may leave a Register unmapped."""

    def __init__(self, source: Any, twist: dict[type, dict[str, Any]] | None = None, maps: bool = True) -> None:
        super().__init__(source)
        self.twist, self.maps, self.said = twist or {}, maps, list[Any]()
        self.keep = self.pass_on

    def pass_on(self, to: str, frame: bytes) -> int:
        message = decode(frame)
        self.said.append(message)
        changes = self.twist.get(type(message))
        if changes:
            receiver: Any = self.sources.get(to) or self.sinks[to]
            twisted = encode(attrs.evolve(message, **changes))
            receiver.receive("d0" if to in self.sources else "s0", twisted, self.now)
        return not changes

    def accept(self, address: str, session: int) -> None:
        if self.maps:
            super().accept(address, session)

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.said if type(m) is kind]


def met(twist: dict[type, dict[str, Any]] | None = None, maps: bool = True) -> Watched:
    world = Watched(geometry(1), twist, maps)
    world.join("d0", geometry(1))
    return world


def test_register_follows_both_descriptions_and_states_the_plan_of_the_two() -> None:
    """KVP-DSC-BOTH, KVP-DSC-ONLY: nothing but the two geometries decides the routes."""
    world = met()
    kinds = [type(m) for m in world.said]
    assert kinds.index(Describe) < kinds.index(Description) < kinds.index(Register) < kinds.index(Registered)
    (register,), (registered,) = world.of(Register), world.of(Registered)
    made = plan(geometry(1), geometry(1))
    assert bytes(register.plan) == bytes(registered.plan) == made.digest
    assert register.routes == registered.routes == tuple(route.ref for route in made.routes)


@pytest.mark.parametrize("kind", [Describe, Description])
def test_a_geometry_without_its_digest(kind: type) -> None:
    """KVP-DSC-DIGEST, of either side."""
    world = met({kind: {"digest": bytes(32)}})
    (event,) = world.events("d0", "Refused")
    assert (event.error.code, event.error.path) == (ErrorCode.BAD_DIGEST, "digest")
    assert not world.of(Register)


def test_an_error_inside_the_geometry_has_its_path_below_geometry() -> None:
    """KVP-DSC-PATH."""
    whole = encode_geometry(geometry(1))
    # the codec writes no layers that are out of order, so they are made so in its bytes: 0, 1, 2 as an array of u8
    data = whole.replace(bytes.fromhex("c70301 000102"), bytes.fromhex("c70301 000202"))
    assert data != whole
    world = met({Describe: {"geometry": data, "digest": hashlib.sha256(data).digest()}})
    (refused,) = world.of(Refused)
    assert refused.path == "geometry.ranks[0].owns[0].layers[2]"
    assert refused.code == ErrorCode.BAD_GEOMETRY


def _twists() -> list[tuple[dict[str, Any], ErrorCode, str]]:
    """What may be wrong with a Register, in the order of the table of Registers."""
    (good,) = met().of(Register)
    first, region = good.columns[0], good.regions[0]
    return [
        ({"source": bytes(32)}, ErrorCode.DESCRIPTION_MISMATCH, "source"),
        ({"sink": bytes(32)}, ErrorCode.DESCRIPTION_MISMATCH, "sink"),
        ({"access": Access.READ}, ErrorCode.NO_TRANSPORT, "access"),
        ({"routes": ()}, ErrorCode.ROUTE_MISMATCH, "routes[0]"),
        ({"plan": bytes(32)}, ErrorCode.ROUTE_MISMATCH, "plan"),
        ({"regions": tuple(attrs.evolve(region, id=i) for i in range(1025))}, ErrorCode.TOO_LARGE, "regions"),
        ({"columns": good.columns[1:]}, ErrorCode.BAD_COLUMNS, "columns"),
        ({"columns": (attrs.evolve(first, region=first.region.astype(np.uint32) + 77), *good.columns[1:])}, ErrorCode.BAD_COLUMNS,
         "columns[0].region[0]"),
        ({"columns": (attrs.evolve(first, offset=first.offset.astype(np.uint64) + (1 << 40)), *good.columns[1:])},
         ErrorCode.OUT_OF_REGION, "columns[0].offset[0]"),
    ]  # fmt: skip


def test_a_register_with_two_faults_is_refused_by_the_first_check_of_the_table() -> None:
    """KVP-REG-ORDER."""
    twists = _twists()
    for i, (fault, code, path) in enumerate(twists):
        for other, _, _ in [({}, code, path), *twists[i + 1 :]]:
            if fault.keys() & other.keys():
                continue
            (refused,) = met({Register: fault | other}).of(Refused)
            assert (refused.code, refused.path) == (code, path)


def test_a_geometry_that_cannot_be_planned_with_is_refused_by_the_error_of_planning() -> None:
    """KVP-DSC-PLAN."""
    world = Watched(geometry(1))
    world.join("d0", geometry(1, groups=(mla(0, "target", 0, 48, 4, DType.F32), *geometry(1).groups[1:])))
    (refused,) = world.of(Refused)
    assert (refused.code, refused.path) == (ErrorCode.LANE_MISMATCH, "groups[target].parts[latent].lanes")
    assert not world.of(Description)


def test_the_version_of_a_geometry_that_does_not_change() -> None:
    """KVP-DSC-VERSION: every session of an endpoint states one version, as its geometry never changes."""
    world = met()
    world.join("d1", geometry(1), engine="e")
    assert len({m.version for m in world.of(Description)}) == 1


@pytest.mark.parametrize("ends", [False, True])
def test_a_plan_that_is_made_later_is_told_once(ends: bool) -> None:
    """KVP-ERR-ALONE, KVP-SES-STATE, KVP-SES-PONG: meanwhile the session answers Ping, refuses another Describe, and may end."""
    world = Heard(sinks=0)
    source, later = world.sources["s0"], list[Any]()
    source.plans.defer = lambda work, then: later.append(lambda: then(work()))
    for name in ("d0", "d1"):  # two runs state the same, which is planned once
        world.sink(name, geometry(1), engine=name)
    world.run()
    (session, _), describe = source.sessions.values(), world.of(Describe)[0]
    assert ([s.state for s in source.sessions.values()], len(later)) == ([SessionState.DESCRIBING] * 2, 1)
    assert [type(m) for m in world.say(Ping(session=session.session, request=90))] == [Pong]
    assert world.say(describe) == []
    (refused,) = world.say(attrs.evolve(describe, request=91))
    assert refused.code == ErrorCode.UNEXPECTED_MESSAGE
    if ends:
        world.sinks["d0"].goodbye("enough")
        world.run()
    later.pop()()
    world.run()
    assert [s.ready for s in world.sinks.values()] == [not ends, True]
    assert len(world.of(Description)) == 2 - ends
    world.serves("d1")


def test_source_ranks_without_a_route_hear_nothing_of_transfers() -> None:
    """KVP-TRN-DUMMY: of four ranks that hold the same latent one serves the only layer; three are dummies."""
    latent = [Cache.mla("target", 1, latent=8, rope=2, page=4)]
    world = Watched(lay_out(latent, Parallel(tp=4)))
    heard: dict[str, set[type]] = {}

    def listen(to: str, frame: bytes) -> int:
        heard.setdefault(to, set()).add(type(decode(frame)))
        return 1

    world.keep = listen
    sink = world.join("d0", lay_out(latent))
    made = ticket()
    world.fetch("d0", made, b"c" * 32)
    assert sink.ready
    routed = [a for a in world.sources if Transfer in heard.get(a, ())]
    assert len(routed) == 1
    assert all(not {Register, Transfer} & heard.get(a, set()) for a in world.sources if a not in routed)
    for address in routed:
        world.sources[address].prefill(made, b"c" * 32, world.now)
    world.serve(routed[0])
    assert len(world.events("d0", "Arrived")) == 1


@pytest.mark.parametrize("field", ["source", "sink"])
def test_a_register_that_names_another_description(field: str) -> None:
    """KVP-REG-DIGESTS."""
    world = met({Register: {field: bytes(32)}})
    (refused,) = world.of(Refused)
    assert (refused.code, refused.path) == (ErrorCode.DESCRIPTION_MISMATCH, field)
    assert not world.of(Registered)


@pytest.mark.parametrize(
    ("changes", "path", "mine"),
    [({"plan": bytes(32)}, "plan", ""), ({"routes": ()}, "routes[0]", "group 0 (target), ")],
)
def test_a_registered_that_states_other_routes_ends_the_session(changes: dict[str, Any], path: str, mine: str) -> None:
    """KVP-REG-CHECK: the error names the route that is missing."""
    world = met({Registered: changes})
    (event,) = world.events("d0", "Refused")
    assert (event.error.code, event.error.path) == (ErrorCode.ROUTE_MISMATCH, path)
    assert event.error.mine.startswith(mine)
    assert not world.sinks["d0"].ready


def test_registered_waits_until_the_memory_is_mapped() -> None:
    """KVP-REG-MAP."""
    world = met(maps=False)
    assert len(world.of(Register)) == 1
    assert not world.of(Registered)
    (number,) = world.sources["s0"].sessions
    world.sources["s0"].sessions[number].accept_register(Transport.SHM)
    world.run()
    assert len(world.of(Registered)) == 1
    assert world.sinks["d0"].ready


def test_memory_that_cannot_be_mapped_is_refused_and_the_next_register_is_served() -> None:
    """KVP-REG-FAIL."""
    world = met(maps=False)
    (number,) = world.sources["s0"].sessions
    error = RemoteError(ErrorCode.TRANSPORT_FAILED, "regions[0].handles[0]", "a sealed file", "a file that may shrink")
    world.sources["s0"].sessions[number].holder.refuse(error)
    world.run()
    (refused,) = world.of(Refused)
    assert (refused.code, refused.path) == (ErrorCode.TRANSPORT_FAILED, "regions[0].handles[0]")
    world.maps = True
    world.join("d1", geometry(1), engine="e")
    assert world.sinks["d1"].ready


def test_a_refusal_that_comes_after_registered_changes_nothing() -> None:
    """KVP-SES-ANSWERED: a Register whose first copy was damaged is refused, and its second overtakes the Refused."""
    world = met()
    (register,), (registered,) = world.of(Register), world.of(Registered)
    late = Refused(
        session=registered.session, request=register.request, code=ErrorCode.TRANSPORT_FAILED, path="regions[0]",
        mine="a sealed file", yours="a file that may shrink",
    )  # fmt: skip
    world.sinks["d0"].receive("s0", encode(late), world.now)
    made = ticket()
    world.fetch("d0", made, b"c" * 32)
    world.sources["s0"].prefill(made, b"c" * 32, world.now)
    world.serve()
    assert len(world.events("d0", "Arrived")) == 1


def test_an_access_that_the_holder_has_no_use_for() -> None:
    """KVP-REG-ACCESS: a source that pushes cannot use memory that it may only read."""
    world = met({Register: {"access": Access.READ}})
    (refused,) = world.of(Refused)
    assert (refused.code, refused.path) == (ErrorCode.NO_TRANSPORT, "access")
    assert (refused.mine, refused.yours) == ("WRITE", "READ")
    assert not world.of(Error)
