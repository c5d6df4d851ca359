"""A process that had no descriptor left for whoever connected by UCX: it is reached again once it exposes memory anew."""

import contextlib
import importlib.util
import multiprocessing
import os
import resource
import socket
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import pytest

from kvproto.copying.program import CopyProgram
from kvproto.transport.nixl.agent import Agent
from kvproto.transport.nixl.direct import WriteMode
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.transport.shm.memory import SharedMemory
from kvproto.wire.messages import Region
from tests.processes import FORKED, imported
from tests.transport.test_nixl import LONG, program

imported("nixl._bindings", __name__)
SIZE = 1 << 16


def exposing(conn: Connection, transports: str, mode: WriteMode, made: CopyProgram, length: int) -> None:
    """Does what it is told, and answers with a region that is exposed, or with how many agents there are."""
    os.environ["UCX_TLS"] = transports
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    memory = {0: SharedMemory(length)}
    with closing(NixlTransport(mode, slots=4, slot_bytes=SIZE)) as transport:
        exposures = []
        while asked := conn.recv():
            if asked == "limit":
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            elif asked == "no limit":
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            elif asked == "unreachable":
                transport.unreachable()
            elif asked == "let go":
                for each in exposures:
                    if each.packed:
                        each.packed.close()
                transport.forget(memory)
                transport.unreachable()
            if asked != "expose":
                conn.send(1 + (transport._former is not None))
                continue
            exposures.append(transport.expose(memory, 1, made, made.runs))
            staging = exposures[-1].regions
            conn.send(staging[0] if staging else attrs.evolve(memory[0].region, handles=exposures[-1].handles[0]))


def listening(process: int) -> list[int]:
    """The TCP ports that a process listens at."""
    found = []
    for fd in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(fd))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in found]


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.parametrize("mode", [WriteMode.PACKED, WriteMode.DIRECT])
def test_who_could_not_accept_a_connection_is_reached_by_another_agent(
    mode: WriteMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    made, length = program(1)
    ours, theirs = multiprocessing.Pipe()
    process = FORKED.Process(target=exposing, args=(theirs, "tcp", mode, made, length), daemon=True)
    process.start()
    theirs.close()
    with Agent() as agent:
        source = agent.register(bytearray(SIZE))

        def ask(what: str) -> object:
            ours.send(what)
            assert ours.poll(LONG)
            return ours.recv()

        def region() -> Region:
            made = ask("expose")
            assert isinstance(made, Region)
            return made

        def written(region: Region) -> bool:
            with closing(agent.connect(region, "regions[0]")) as peer:
                return peer.write(source.memory.part(0, 64), peer.memory.part(0, 64)).wait(LONG)

        region()
        ports = listening(process.pid)
        ask("limit")
        for port in ports:  # not by UCX, which may end this process where nobody listens
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), LONG) as one:
                one.recv(1)
        ask("no limit")
        assert {*ports} - {*listening(process.pid)}, "UCX goes on listening: `unreachable` is needed no more"
        assert ask("unreachable") == 1
        assert written(region())
        assert ask("unreachable") == 2, "the former agent is kept while its memory is exposed, and no third is made"
        assert written(region())
        assert ask("let go") == 1
        assert written(region())
        ours.send("")
    process.join(LONG)
    assert process.exitcode == 0
