"""A peer that names memory of another process as its own, of which it was told in a session with that process."""

import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest

from kvproto.events import Refused
from kvproto.session.descriptions import Party
from kvproto.session.registering import attestation_of
from kvproto.transport.process import Attestations, attestations, attested
from kvproto.transport.shm.memory import SharedMemory, connect
from kvproto.wire import decode, encode
from kvproto.wire.codec import decode_struct, encode_struct
from kvproto.wire.enums import Access, ErrorCode
from kvproto.wire.messages import Region, Register
from tests.node import nodes
from tests.node.test_node import Pair, pairs
from tests.processes import FORKED, imported

imported(__name__)
LENGTH = 1 << 20


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    yield from pairs(tmp_path)


def owner(pipe: Connection) -> None:
    """A process that has memory registered with somebody."""
    memory = SharedMemory(LENGTH)
    attestations.add(b"o" * 32)
    pipe.send(encode_struct(memory.region))
    pipe.recv()
    pipe.send(not any(memory.buffer))


@pytest.fixture
def others() -> Iterator[tuple[Region, Connection]]:
    ours, theirs = FORKED.Pipe()
    process = FORKED.Process(target=owner, args=(theirs,), daemon=True)
    process.start()
    yield decode_struct(Region, ours.recv()), ours
    process.kill()
    process.join()


@pytest.mark.parametrize("pull", [False, True])
def test_memory_of_another_process_is_refused(
    pair: Callable[..., Pair], others: tuple[Region, Connection], pull: bool
) -> None:
    """KVP-REG-ATTEST: in push the sink says that it is its own, in pull the source."""
    region, process = others
    made = pair(1, 1, pull=pull)

    def taken(_: Any, frame: bytes) -> bytes:
        said = decode(frame)
        if not isinstance(said, Register):
            return frame
        return encode(attrs.evolve(said, regions=tuple(attrs.evolve(r, handles=region.handles) for r in said.regions)))

    nodes.seen((made.sources if pull else made.sinks)[0], taken)
    made.until(lambda: made.count(Refused) == 2)
    for refused in made.ends(Refused, 2):
        assert (refused.error.code, refused.error.path) == (ErrorCode.TRANSPORT_FAILED, "regions[0].handles")
    process.send("have they written?")
    assert process.recv()


class Side:
    """As much of a session as is attested."""

    def __init__(self, role: str, session: int, source: Party, sink: Party) -> None:
        self.role, self.session = role, session
        self.me, self.peer = (source, sink) if role == "source" else (sink, source)


def test_both_sides_say_the_same_and_any_other_session_another() -> None:
    """A source that was told of memory has another attestation for it than any other source."""
    source, sink = Party("prefill", 1, 2, 3), Party("decode", 5, 6, 4)

    def of(role: str = "source", session: int = 7, access: Access = Access.WRITE, *sides: Party) -> bytes:
        given: Any = Side(role, session, *(sides or (source, sink)))
        return attestation_of(given, access)

    assert of("source") == of("sink")
    assert of().hex() in Path("spec/v1/registration.md").read_text()
    assert of("source", 7, Access.WRITE, Party("prefill", 1, 2, 9), Party("decode", 5, 6, 9)) == of()
    others = [
        of(session=8),
        of(access=Access.READ),
        of("source", 7, Access.WRITE, sink, source),
        *(
            of("source", 7, Access.WRITE, attrs.evolve(source, **change), sink)
            for change in ({"engine": "other"}, {"replica": 2}, {"rank": 1})
        ),
        *(
            of("source", 7, Access.WRITE, source, attrs.evolve(sink, **change))
            for change in ({"engine": "other"}, {"replica": 1}, {"rank": 1})
        ),
    ]
    assert len({of(), *others}) == 1 + len(others)


def test_what_is_attested_is_read_by_others_until_it_is_dropped() -> None:
    ours = Attestations()
    ours.add(b"1" * 32)  # before anybody can read it
    pid = os.getpid()
    memories = [Side("source", 1, Party("p", 0, 0, 1), Party("d", 0, 0, 1)) for _ in range(2)]  # any objects
    fd = ours.of(memories[0])
    for each in (b"2" * 32, b"3" * 32, b"3" * 32):
        ours.add(each)
    assert all(attested(pid, fd, n * 32) for n in (b"1", b"2", b"3"))
    ours.drop(b"2" * 32)
    ours.drop(b"9" * 32)
    assert not attested(pid, fd, b"2" * 32)
    ours.add(b"4" * 32)
    assert [attested(pid, fd, n * 32) for n in (b"1", b"3", b"4", b"\x00")] == [True, True, True, False]
    assert not attested(pid, fd, (b"1" * 32 + b"4" * 32)[16:48])
    assert not attested(pid, 1 << 20, b"1" * 32)
    assert ours.of(memories[1]) == ours.of(memories[1]) == fd
    ours.gone(memories[0])
    assert attested(pid, fd, b"1" * 32)
    del memories[1]
    assert not attested(pid, fd, b"1" * 32)
    assert attested(pid, ours.of(memories[0]), b"1" * 32)  # its sessions go on


def test_a_file_that_holds_the_bytes_but_is_a_cache_attests_nothing() -> None:
    """Peers write the bytes of caches."""
    memory = SharedMemory(4096)
    memory.buffer[:32] = b"1" * 32
    pid, fd, *_ = msgpack.unpackb(bytes(memory.region.handles[0].data))
    assert not attested(pid, fd, b"1" * 32)
    connect(memory.region, "regions[0]").close()
