"""Where a source binds, where it says that it is reached, and names of hosts: of IPv6 alone, and that move."""

import ctypes
import socket
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvproto import Cache, DType, LocalError, Options, Parallel, Pool, Sink, Source, lay_out, new_ticket
from tests.demo.test_by_hand import free_port
from tests.processes import FORKED, imported

from .doors import GEOMETRY, PAGE, PAGES, PROMPT, Two, filled, rows

imported(__name__)

OPEN = Options(thread=False, insecure=True)
HALVES = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=PAGE, dtype=DType.U8)], Parallel(tp=2))
_NEWNS, _SLAVE, _RECURSIVE, _BIND = 0x00020000, 1 << 19, 1 << 14, 1 << 12


def test_all_ranks_are_dialled_where_they_are_advertised(tmp_path: Path) -> None:
    """They bind to other addresses, at which nobody reaches them."""
    bound, outside = tmp_path / "bound", tmp_path / "outside"
    for folder in (bound, outside):
        folder.mkdir(mode=0o700)
    listen, advertise = f"ipc://{bound}/{{rank}}", f"ipc://{outside}/{{rank}}"
    options, ticket = Options(thread=False), new_ticket("prefill")
    with ExitStack() as stack:
        pools = [Pool.allocate(HALVES, PAGES, rank=rank) for rank in range(2)]
        sources = [stack.enter_context(Source("prefill", pool, listen, options, advertise=advertise)) for pool in pools]
        for rank in "01":
            (bound / rank).rename(outside / rank)
        sink = stack.enter_context(
            Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": advertise.format(rank=0)}, options)
        )
        requests = [source.request(ticket, PROMPT) for source in sources]
        fetch = sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
        for request in requests:
            request.finish({"kv": [3, 1, 2]})
        for _ in range(4000):
            if fetch.done:
                break
            for each in (*sources, sink):
                each.step(0.001)
        assert fetch.wait(0).bytes == {0: 160, 1: 160}


@pytest.mark.parametrize(
    ("advertise", "says"),
    [
        ("tcp://0.0.0.0:7100", "can be dialled"),
        ("tcp://*:7100", "can be dialled"),
        ("tcp://outside", "a host and a port"),
        ({1: "tcp://outside:7100"}, "an address for each of the ranks"),
        (7, "an address, or a mapping"),
    ],
)
def test_what_nobody_could_dial_is_not_advertised(advertise: Any, says: str) -> None:
    with pytest.raises(LocalError, match="OUT_OF_RANGE at advertise") as refused:
        Source("prefill", filled(), "tcp://127.0.0.1:*", OPEN, advertise=advertise)
    assert says in str(refused.value)


def test_all_interfaces_are_bound_if_ranks_are_advertised(tmp_path: Path) -> None:
    pool = Pool.allocate(HALVES, PAGES, rank=1)
    wild = {0: "tcp://0.0.0.0:1", 1: "tcp://0.0.0.0:*"}
    with pytest.raises(LocalError, match=r"OUT_OF_RANGE at listen: .*`advertise`"):
        Source("prefill", pool, wild, OPEN)
    Source("prefill", pool, wild, OPEN, advertise="tcp://prefill-{rank}.kv:7100").close()


def _in_namespace(hosts: Path, scenario: Callable[[Path, Any], object], line: Connection) -> None:
    """Run a scenario with a file in the place of /etc/hosts, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_NEWNS)
        or libc.mount(b"none", b"/", None, _SLAVE | _RECURSIVE, None)
        or libc.mount(bytes(hosts), b"/etc/hosts", None, _BIND, None)
    ):
        line.send(f"mount namespace: error {ctypes.get_errno()}")
        return
    try:
        scenario(hosts, line)
        line.send("")
    except BaseException as error:
        line.send(error)
        raise


def run(tmp_path: Path, hosts: str, scenario: Callable[[Path, Any], object]) -> None:
    file = tmp_path / "hosts"
    file.write_text(hosts)
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=_in_namespace, args=(file, scenario, there), daemon=True)
    process.start()
    there.close()
    assert here.poll(120)
    said = here.recv()
    process.join()
    if isinstance(said, str) and said:
        pytest.skip(said)
    assert said == ""
    assert process.exitcode == 0


def _hands_over(source: Source, sink: Sink) -> None:
    both = Two(source, sink)
    request, fetch = both.asked([9, 0, 5])
    request.finish({"kv": [3, 1, 2]})
    both.ends(fetch)
    assert (rows(sink.pool, [9, 0, 5]) == rows(source.pool, [3, 1, 2])).all()


def _ipv6_alone(hosts: Path, line: Any) -> None:
    assert {family for family, *_ in socket.getaddrinfo("kv-six", None)} == {socket.AF_INET6}
    address = f"tcp://kv-six:{free_port()}"
    with (
        Source("prefill", filled(), address, OPEN) as source,
        Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, OPEN) as sink,
    ):
        _hands_over(source, sink)


def _moves(hosts: Path, line: Any) -> None:
    """The engine starts again at another address, and the name follows: first of IPv4, then of IPv6."""
    address = f"tcp://kv-name:{free_port()}"
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, OPEN) as sink:
        for number in ("127.0.0.1", "127.0.0.2", "::1"):
            hosts.write_text(f"{number} kv-name\n")
            with Source("prefill", filled(), address, OPEN) as source:
                _hands_over(source, sink)
            while sink.ready:
                sink.step(0.01)


def test_a_host_that_has_only_ipv6_is_reached_by_its_name(tmp_path: Path) -> None:
    run(tmp_path, "::1 kv-six\n", _ipv6_alone)


def test_a_name_is_followed_to_another_address(tmp_path: Path) -> None:
    run(tmp_path, "127.0.0.1 kv-name\n", _moves)
