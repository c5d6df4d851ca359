"""Peers that die, come back or never come, forks, aborts at every stage, tickets that run out: errors, no hang, proof."""

import multiprocessing
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

import kvproto.session.limits
from kvproto import Fetch, KvprotoError, Options, Pool, Request, Sink, Source, new_ticket, read_ticket, write_ticket
from kvproto import events as told
from kvproto.errors import DeviceFault, LocalError
from kvproto.sink.node import SinkNode
from kvproto.transport.process import Watch, boot_id
from kvproto.wire.enums import ErrorCode
from tests.errors import raises
from tests.processes import FORKED, imported

from .doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, filled, rows, two

imported(__name__)

WAYS = [pytest.param(Options(), id="thread"), pytest.param(STEPPED, id="step")]


def served(both: Two) -> None:
    ticket = new_ticket("prefill")
    request = both.source.request(ticket, PROMPT)
    request.finish({"kv": [3, 1, 2]})
    found = both.sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
    both.until(lambda: found.done and request.done)
    found.wait(0)
    assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


STAGES: dict[str, Callable[[Two, Request, Fetch], object]] = {
    "at once": lambda both, request, found: None,
    "while prefill runs": lambda both, request, found: both.until(
        lambda: any(isinstance(e, told.Connected) for e in both.told)
    ),
    "after a part": lambda both, request, found: request.computed({"kv": [3]}, 4),
    "after finish": lambda both, request, found: request.finish({"kv": [3, 1, 2]}),
}


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort(tmp_path: Path, options: Options, stage: str) -> None:
    with two(tmp_path, options) as both:
        request, found = both.asked([9, 0, 5])
        STAGES[stage](both, request, found)
        found.abort("the client is gone")
        both.until(lambda: found.done)
        if stage != "after finish":
            with raises(KvprotoError, match="the client is gone", code=ErrorCode.ABORTED):
                found.wait(0)
            both.until(lambda: found.pages_free)
        found.abort()
        if not request.done:
            request.fail("nobody wants it")
        assert both.sink.quarantined == {}
        served(both)


def test_what_the_source_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        request, found = both.asked([9, 0, 5])
        request.fail("no free pages")
        with pytest.raises(KvprotoError, match="no free pages"):
            found.wait(10)
        served(both)


@pytest.mark.parametrize("options", WAYS)
def test_a_ticket_that_runs_out_frees_the_pages(tmp_path: Path, options: Options) -> None:
    with two(tmp_path, options) as both:
        request = both.source.request(new_ticket("prefill", deadline=0.05), PROMPT)
        request.finish({"kv": [3, 1, 2]})
        assert isinstance(both.ends(request), told.Expired)
        served(both)


@pytest.mark.parametrize(
    ("source", "sink", "deadline", "patience", "code"),
    [(0.05, 500, 20, 30.0, "UNKNOWN_TICKET"), (500, 0.05, 1, 2.0, "DEADLINE")],
)
def test_how_long_a_fetch_waits_for_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: float, sink: float, deadline: float, patience: float,
    code: str,
) -> None:  # fmt: skip
    """KVP-TKT-EARLY, KVP-TRN-ENDLESS: each side counts by its own setting, whatever the process says."""
    for name, seconds in (("TICKET_WAIT", 1000.0), ("PATIENCE", patience)):
        monkeypatch.setattr(kvproto.session.limits, name, seconds)
    address = address_in(tmp_path)
    with (
        Source("prefill", filled(), address, Options(ticket_wait=source)),
        Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, Options(ticket_wait=sink)) as asking,
        raises(KvprotoError, code=ErrorCode[code]),
    ):
        asking.fetch(new_ticket("prefill", deadline=deadline), PROMPT, {"kv": [9, 0, 5]}).wait(60)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}) as sink:
        ticket = new_ticket("prefill")
        found = sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
        with pytest.raises(TimeoutError):
            found.wait(0.05)
        with Source("prefill", filled(), address) as source:  # it comes later
            source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
            assert found.wait(10).bytes == {0: 320}


def test_a_source_that_never_comes_can_be_given_up(tmp_path: Path) -> None:
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address_in(tmp_path)}) as sink:
        found = sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [9, 0, 5]})
        found.abort()
        with pytest.raises(KvprotoError):
            found.wait(10)
        assert found.pages_free


def prefill(conn: Connection, address: str, options: Options | None = None) -> None:
    """A source that takes one request, and serves it when it is told to."""
    with Source("prefill", filled(), address, options) as source:
        request = source.request(read_ticket(conn.recv()), PROMPT)
        conn.send("taken")
        conn.recv()
        request.finish({"kv": [3, 1, 2]})
        request.wait(30)


def spawned(target: Callable[..., None], *arguments: object) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = FORKED.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_a_source_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Its end is proof that nothing writes the pages any more (KVP-REG-DEATH); its successor at the same address serves."""
    address = address_in(tmp_path)
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}) as sink:

        def fetch(conn: Connection) -> Fetch:
            ticket = new_ticket("prefill")
            conn.send(write_ticket(ticket))
            assert conn.recv() == "taken"
            return sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})

        first, conn = spawned(prefill, address)
        found = fetch(conn)
        connected: list[told.Event] = []
        while not connected:
            connected = [e for e in sink.events() if isinstance(e, told.Connected)]
        os.kill(first.pid or 0, signal.SIGKILL)
        with raises(KvprotoError, code=ErrorCode.PEER_LOST):
            found.wait(30)
        first.join(10)
        second, conn = spawned(prefill, address)
        found = fetch(conn)
        conn.send("go on")
        assert found.wait(30).bytes == {0: 320}
        second.join(10)
        assert sink.quarantined == {}
        assert np.array_equal(rows(sink.pool, [9, 0, 5]), rows(filled(), [3, 1, 2]))


def test_a_killed_source_is_noticed_when_its_port_is_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-BACK: where nothing proves its end, and before any silence is long enough."""
    monkeypatch.setattr(kvproto.session.limits, "PING_SILENCE", 1000.0)
    monkeypatch.setattr(Watch, "of", lambda process: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    remote = Options(insecure=True, transports=["inline"])
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, remote) as sink:

        def hears(kind: type) -> None:
            until = time.monotonic() + 60
            while not any(isinstance(e, kind) for e in sink.events()):
                assert time.monotonic() < until, "it never came"

        first, _ = spawned(prefill, address, remote)
        hears(told.Connected)
        first.kill()
        first.join()
        second, conn = spawned(prefill, address, remote)
        hears(told.Disconnected)
        ticket = new_ticket("prefill")
        conn.send(write_ticket(ticket))
        assert conn.recv() == "taken"
        found = sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
        conn.send("go on")
        assert found.wait(30).bytes == {0: 320}
        second.join()


def test_a_source_that_is_restarted(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        served(both)
        both.source.close()
        both.until(lambda: any(isinstance(e, told.Disconnected) for e in both.told))
        with Source("prefill", both.source.pool, address_in(tmp_path)) as again:
            ticket = new_ticket("prefill")
            again.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
            assert both.sink.fetch(ticket, PROMPT, {"kv": [10, 11, 12]}).wait(20).bytes == {0: 320}


def test_a_source_that_closes_while_a_request_is_under_way(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        request, found = both.asked([9, 0, 5])
        both.until(lambda: any(isinstance(e, told.Connected) for e in both.told))
        both.source.close()
        with pytest.raises(KvprotoError):
            found.wait(10)
        with pytest.raises(KvprotoError, match="closed"):
            request.wait(0)


def test_a_source_drains(tmp_path: Path) -> None:
    """What a sink has asked for is finished, the rest refused by a typed code, and the next source serves."""
    with two(tmp_path) as both:
        asked, ticket = both.source.request(both.ticket, PROMPT), new_ticket("prefill")
        unasked = both.source.request(ticket, PROMPT)
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        both.until(lambda: both.source._node.tickets.is_asked(bytes(both.ticket.key)))
        both.source.drain()
        with raises(KvprotoError, code=ErrorCode.DRAINING):
            both.source.request(new_ticket("prefill"), PROMPT)
        both.until(lambda: unasked.done)
        assert not both.source.drained
        asked.finish({"kv": [3, 1, 2]})
        assert found.wait(10).bytes == {0: 320}
        both.until(lambda: both.source.drained)
        with raises(KvprotoError, code=ErrorCode.DRAINING):
            both.sink.fetch(ticket, PROMPT, {"kv": [10, 11, 12]}).wait(10)
        both.source.close()
        both.until(lambda: any(isinstance(e, told.Disconnected) for e in both.told))
        with Source("prefill", both.source.pool, address_in(tmp_path)) as both.source:
            served(both)


def test_a_sink_drains(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        request, found = both.asked([9, 0, 5])
        both.sink.drain()
        with raises(KvprotoError, code=ErrorCode.DRAINING):
            both.sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [10, 11, 12]})
        assert not both.sink.drained
        request.finish({"kv": [3, 1, 2]})
        assert found.wait(10).bytes == {0: 320}
        assert both.sink.drained


def test_a_stepped_source_that_gets_no_turns_is_suspect_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVP-SES-SUSPECT: a fetch waits meanwhile, and is served when the source is back."""
    monkeypatch.setattr(kvproto.session.limits, "PING_SILENCE", 0.1)
    with two(tmp_path, theirs=Options(), options=STEPPED) as both:
        request = both.source.request(both.ticket, PROMPT)
        both.until(lambda: any(isinstance(e, told.Connected) for e in both.told))
        heard = [*both.told]
        while not any(isinstance(e, told.Suspected) for e in heard):
            heard += both.sink.events()
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: any(isinstance(e, told.Recovered) for e in both.told) and found.done)
        assert found.wait(0).bytes == {0: 320}


def test_an_engine_that_computes_is_no_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-PING: heartbeats are those of the I/O thread. A machine that stands still may look like silence once."""
    for silence in (0.2, 1.0, 8.0):
        monkeypatch.setattr(kvproto.session.limits, "PING_SILENCE", silence)
        folder = tmp_path / str(silence)
        folder.mkdir(0o700)
        with two(folder) as both:
            both.until(lambda both=both: any(isinstance(e, told.Connected) for e in both.told))
            until = time.monotonic() + 5 * silence
            while time.monotonic() < until:
                sum(range(10_000))
            both.turn()
            suspected = any(isinstance(e, told.Suspected) for e in both.told)
        if not suspected:
            break
    assert not suspected


def test_without_a_descriptor_memory_is_refused_and_a_sink_registers_what_it_has(tmp_path: Path) -> None:
    """Whatever a turn needs of /proc is read before."""
    boot_id.cache_clear()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), options=STEPPED) as sink:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert {region.boot for region in (each.region for each in sink.pool.memories.values())} == {boot_id()}
            with pytest.raises(KvprotoError, match="ulimit"):
                Pool.allocate(GEOMETRY, PAGES)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork(tmp_path: Path) -> None:
    """In the child each call says so, and the parent's requests go on."""
    with two(tmp_path) as both:
        request, found = both.asked([9, 0, 5])
        child = os.fork()
        if not child:
            calls = (lambda: found.wait(5), lambda: request.wait(5), lambda: request.finish({"kv": [3, 1, 2]}),
                     lambda: both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}), both.source.fileno)  # fmt: skip
            said = []
            for call in calls:
                try:
                    call()
                except KvprotoError as error:
                    said.append("fork" in str(error))
            both.source.close()
            os._exit(0 if said == [True] * len(calls) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        request.finish({"kv": [3, 1, 2]})
        assert found.wait(10).bytes == {0: 320}
        served(both)


def test_a_fetch_for_which_no_connection_can_be_made_is_told_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory is short for a moment: its pages are free, and the next fetch is served."""

    def short(*given: object) -> None:
        raise MemoryError("no memory for a link")

    with two(tmp_path, STEPPED) as both:
        served(both)
        both.source.close()
        while both.sink.ready:
            both.sink.step(0.01)
        with Source("prefill", filled(), address_in(tmp_path), STEPPED) as again:
            both = Two(again, both.sink)
            monkeypatch.setattr("kvproto.sink.node.SourceLink", short)
            found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
            both.until(lambda: any(isinstance(event, told.Lost) for event in both.told))
            monkeypatch.undo()
            (lost,) = (event for event in both.told if isinstance(event, told.Lost))
            assert (lost.fetch, lost.pages_free, found.pages_free) == (found, True, True)
            with pytest.raises(MemoryError):
                found.wait(0)
            served(both)


def test_what_ends_an_io_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the descriptor, and by `events` once what came before is told, to an engine that waits for nothing else."""

    def lost(node: SinkNode, ready: object) -> list[object]:
        raise DeviceFault(LocalError(ErrorCode.TRANSPORT_FAILED, "", "copy", "CUDA_ERROR_ILLEGAL_ADDRESS", ""))

    with two(tmp_path, Options()) as both:
        served(both)
        both.sink.events()
        asked = both.sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [9, 0, 5]})
        bell = both.sink.fileno()
        monkeypatch.setattr(SinkNode, "turn", lost)
        with pytest.raises(LocalError, match="ILLEGAL_ADDRESS"):
            asked.wait(30)
        assert select.select([bell], [], [], 30)[0]
        while (found := raised(both.sink.events)) is None:
            pass
        assert "ILLEGAL_ADDRESS" in str(found)
        monkeypatch.undo()


def raised(call: Callable[[], object]) -> KvprotoError | None:
    try:
        call()
    except KvprotoError as error:
        return error
    return None
