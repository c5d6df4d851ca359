"""Engines started by hand, one in each terminal."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from kvproto import LocalError, Seed, new_ticket, write_ticket
from kvproto_reference.commands import decode, prefill
from kvproto_reference.demo.control import Line
from kvproto_reference.demo.engines import Engines
from kvproto_reference.demo.network import key_folders
from kvproto_reference.demo.options import parse, unknown_hosts
from kvproto_reference.demo.router import Router
from kvproto_reference.engine.description import STATES, WINDOW
from kvproto_reference.errors import EngineError
from tests.demo.test_demo import TEXT, demo, report
from tests.discovery.members import running
from tests.processes import Command

WHERE = "(an engine that ended says why where it was started)"
COMMANDS = {"prefill": prefill, "decode": decode}
Start = Callable[..., Command]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an engine by role and options."""
    made: list[Command] = []

    def begin(role: str, *args: str | Path) -> Command:
        made.append(Command(COMMANDS[role], args))
        return made[-1]

    yield begin
    for command in made:
        command.process.terminate()
        command.wait(20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir(mode=0o700)
    return made


def wait_ready(folder: Path, name: str, engine: Command) -> None:
    """Until the engine of this name answers; if it has ended, the test fails with what it said."""
    line = Line(folder, name)
    while not [word for word in line.receive() if word["op"] == "ready"]:
        assert engine.process.is_alive(), engine.wait()
        line.socket.poll(100)
    line.close()


_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else is given: it stays bound, and a server that binds it for reuse may listen there."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _HELD.append(one)
    return int(one.getsockname()[1])


@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_a_misfit_is_refused_by_name_and_the_next_is_served(
    start: Start, folder: Path, tmp_path: Path, over: str
) -> None:
    address: list[object] = []
    source_keys: list[object] = []
    if over == "tcp":
        ours, theirs = key_folders(tmp_path)
        port = free_port()
        outside = f"tcp://127.0.0.1:{port}"
        source_keys = ["--prefill", f"tcp://0.0.0.0:{port}", "--advertise", outside, "--tp", 2, "--keys", ours]
        address = ["--prefill", outside, "--keys", theirs, "--source-key", ours / "public.key"]
    source = start("prefill", "--dir", folder, *source_keys)
    wait_ready(folder, "prefill-0", source)
    misfit = start("decode", "--dir", folder, "--target", "gqa", *address)
    status, _, said = misfit.wait()
    assert status == 1
    assert "prefill rank 0 refused decode: IDENTITY_MISMATCH at facts[weights.target]: prefill rank 0 has" in said
    assert ", decode has" in said
    start("decode", "--dir", folder, *address)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    for _ in range(2):
        result = demo("--attach", folder, "--prompt-file", prompts, "--json", "--max-new", "8")
        assert result.status == 0, result.said
        assert report(result)["identical"]
    source.process.terminate()
    assert "prefill rank 0 refused decode rank 0: IDENTITY_MISMATCH" in source.wait().said


def test_engines_find_each_other_in_etcd(start: Start, folder: Path, tmp_path: Path) -> None:
    """At whatever port prefill is, also after it was killed and has started elsewhere."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    with running(tmp_path / "etcd") as member:
        start("decode", "--dir", folder, "--sources", member.place, "--insecure", "--transport", "inline")
        for _ in range(2):
            place = f"tcp://127.0.0.1:{free_port()}"
            prefill = start(
                "prefill", "--dir", folder, "--register", member.place, "--prefill", place, "--insecure",
                "--transport", "inline",
            )  # fmt: skip
            wait_ready(folder, "prefill-0", prefill)
            result = demo("--attach", folder, "--prompt-file", prompts, "--json", "--max-new", "8")
            assert result.status == 0, result.said
            assert report(result)["identical"]
            assert member.etcd.rows()[0]["prefill", 0].address == place
            prefill.process.kill()
            prefill.process.join()


def test_engines_answer_probes(start: Start, folder: Path) -> None:
    """Decode is ready once its source is, and says why not when that has gone; both stay alive."""
    ports = [free_port(), free_port()]
    prefill, decode = (
        start(role, "--dir", folder, "--draft", "none", "--probes", f"127.0.0.1:{port}")
        for role, port in zip(("prefill", "decode"), ports, strict=True)
    )

    def ask(port: int, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    wait_ready(folder, "prefill-0", prefill)
    wait_ready(folder, "decode-0", decode)
    assert ask(ports[0], "/ready")[0] == 200
    until = time.monotonic() + 100
    while ask(ports[1], "/ready")[0] != 200:
        assert time.monotonic() < until
    assert 'kvproto_peers{engine="decode",rank="0",replica="0",role="sink"} 1.0' in ask(ports[1], "/metrics")[1]
    prefill.process.terminate()
    assert prefill.wait().status == 0
    while ask(ports[1], "/ready")[0] != 503:
        assert time.monotonic() < until
    why = ask(ports[1], "/ready")[1]  # the end of a process may be seen before its Goodbye is received
    assert "prefill/0: stopped" in why or "prefill/0: its process has ended" in why
    assert ask(ports[1], "/live")[0] == 200
    decode.process.terminate()
    assert decode.wait().status == 0


def test_nonsense_at_the_control_socket_ends_no_engine(start: Start, folder: Path) -> None:
    engine = start("prefill", "--dir", folder)
    wait_ready(folder, "prefill-0", engine)
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.connect(f"ipc://{folder}/prefill-0")
        for parts in ([b"\x00\x8b\xff"], [b"[" * 100_000], [b"7"], [b"{}"], [b"a", b"b"]):
            other.send_multipart(parts)
        wait_ready(folder, "prefill-0", engine)
    engine.process.terminate()
    assert engine.wait().status == 0


def test_address_in_use(start: Start, folder: Path) -> None:
    wait_ready(folder, "prefill-0", start("prefill", "--dir", folder))
    status, _, said = start("prefill", "--dir", folder).wait()
    assert status == 1
    assert "in use" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("framework", ["torch", "jax.distributed"])
def test_an_engine_ends_with_any_of_its_ranks(start: Start, folder: Path, framework: str) -> None:
    """JAX would wait for the rank that was killed, and then abort."""
    pytest.importorskip("jax") if "jax" in framework else None
    engine = start("prefill", "--dir", folder, "--framework", framework, "--tp", "2", "--draft", "none")
    wait_ready(folder, "prefill-0", engine)
    (other,) = psutil.Process(engine.pid).children()
    other.kill()
    status, _, said = engine.wait(8)
    assert (status, said.strip()) == (1, "error: another rank of this engine has ended")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prefill", "tcp://127.0.0.1:27712"], "--insecure"),
        (["--tp", "0"], "at least 1"),
        (["--pools", "jax"], "--transport cuda"),
        (["--transport", "pigeon"], "one of cuda, inline, nixl, shm"),
        (["--devices", "0"], "--devices needs --transport cuda or nixl"),
        (
            ["--framework", "jax", "--transport", "cuda", "--pp", "2"],
            "a GPU for each of its 2 ranks, --devices names 0",
        ),
        (["--framework", "jax", "--transport", "cuda", "--pools", "jax"], "--pools is torch's"),
        (["--draft", "/no/such/checkpoint"], "checkpoint folder /no/such/checkpoint does not exist"),
    ],
)
def test_bad_options_are_one_sentence(start: Start, folder: Path, args: list[str], says: str) -> None:
    status, _, said = start("prefill", "--dir", folder, *args).wait()
    assert status == 1
    assert says in said
    assert "Traceback" not in said


def test_directory_that_others_may_enter(folder: Path) -> None:
    """By the command itself, in a process that a shell would start."""
    folder.chmod(0o755)
    command = "import sys; from kvproto_reference.commands import prefill; sys.exit(prefill())"
    done = subprocess.run([sys.executable, "-c", command, "--dir", folder], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "mode 0700" in done.stderr) == (1, True)


def test_decode_that_is_killed_costs_prefill_nothing(start: Start, folder: Path, tmp_path: Path) -> None:
    wait_ready(folder, "prefill-0", start("prefill", "--dir", folder))
    first = start("decode", "--dir", folder)
    wait_ready(folder, "decode-0", first)
    first.process.kill()
    first.wait()
    start("decode", "--dir", folder)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    result = demo("--attach", folder, "--prompt-file", prompts, "--json", "--max-new", "8")
    assert json.loads(result.out)["identical"], result.said


@pytest.mark.parametrize(
    ("target", "layout"),
    [("mla", ""), ("mla", "--tp 2 --dcp 2 --interleave 4 --page-size 8"), ("hybrid", "--tp 2 --page-size 8")],
)
def test_what_decode_has_already_is_not_fetched_again(
    start: Start, folder: Path, tmp_path: Path, target: str, layout: str
) -> None:
    """The same prompts twice, and one that goes on otherwise: the units of tokens that are known are left out.

    Recurrent states come whole, and what the next token reads of a sliding window, whatever is known.
    """
    start("prefill", "--dir", folder, "--target", target)
    start("decode", "--dir", folder, "--target", target, *layout.split())
    first, same, other = TEXT.split("\n\n")[0], "same.txt", "other.txt"
    (tmp_path / same).write_text(first)
    (tmp_path / other).write_text(first[:40] + " a bank, and of having nothing to do")
    told = []
    for name in (same, same, other):
        args = "--attach", folder, "--prompt-file", tmp_path / name, "--target", target, "--max-new", "8"
        result = demo(*args, "--json")
        assert result.status == 0, result.said
        told.append(report(result))
        assert told[-1]["identical"]
    unit = 8 if target == "hybrid" else 16
    cached = [0, len(first) // unit * unit, 40 // unit * unit]
    assert [run["requests"][0]["cached"] for run in told] == cached
    moved = [[sum(p["bytes"] for p in run["matrix"] if (p["group"] in {WINDOW, *STATES.values()}) == which) for run in told]
             for which in (False, True)]  # fmt: skip
    tokens = [run["requests"][0]["prompt_tokens"] for run in told]
    a_token = moved[0][0] / tokens[0]
    assert moved[0] == [a_token * (n - had) for n, had in zip(tokens, cached, strict=True)]
    assert len({*moved[1]}) == 1
    assert bool(moved[1][0]) == (target == "hybrid")


def test_a_prompt_that_nobody_fetches_while_it_waits_for_pages_costs_no_engine(start: Start, folder: Path) -> None:
    """Its pages were never taken, so none come back; the next prompt is served when there are some."""
    start("prefill", "--dir", folder, "--pages", "2")
    line, told = Line(folder, "prefill-0"), list[dict[str, Any]]()

    def until(op: str, id: str | None = None) -> dict[str, Any]:
        while not (found := [word for word in told if (word["op"], word.get("id")) == (op, id)]):
            line.socket.poll(100)
            told.extend(line.receive())
            assert not [word for word in told if word["op"] == "lost"]
        return found[0]

    until("ready")
    for name, seconds in (("first", 1.5), ("second", 0.2), ("third", 30)):
        ticket = write_ticket(new_ticket("prefill", deadline=seconds))
        line.send("prefill", id=name, ticket=ticket, prompt=[*range(20)], max_new=4)
    assert until("freed", "second")["available"] == [0, 0]
    until("prefilled", "third")
    line.close()


def test_an_engine_that_does_not_run_is_named(start: Start, folder: Path) -> None:
    """And decode says itself that no prefill answers it."""
    wait_ready(folder, "decode-0", start("decode", "--dir", folder))
    router = Router(folder, "prefill", Engines())
    while not router.takes("decode-0"):
        router._turn(lambda request: None)
    with pytest.raises(EngineError) as caught:
        router.wait_ready(0.5)
    prefill, decode = str(caught.value).removeprefix("not ready in 0.5 s: ").split("; ")
    assert prefill == f"prefill-0 does not run: nothing listens at {folder}/prefill-0 {WHERE}"
    assert decode == "decode-0 runs, and no prefill engine answers it"
    router.close()


def test_an_engine_that_a_library_keeps_from_being_interrupted_ends_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """As when it reads weights: what is raised out of the signal's handler comes back as another error."""
    begun, begins = os.pipe()

    def main(_: list[str]) -> int:
        try:
            os.write(begins, b"1")
            signal.pause()
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None
        return 0

    with Engines() as engines:
        engines.start("prefill-0", main, [])
        os.read(begun, 1)
        engines.signal("prefill-0", signal.SIGINT)
    assert engines.exit_status("prefill-0") == 130
    assert capfd.readouterr().err == ""


def test_a_host_that_is_not_known_is_named() -> None:
    """It may yet come up, so that an engine starts all the same."""
    seeds = {
        ("p", n): Seed(f"tcp://{host}:7100") for n, host in enumerate(("no-such-host.invalid", "127.0.0.1", "[::1]"))
    }
    assert list(unknown_hosts(seeds)) == ["tcp://no-such-host.invalid:7100"]


def test_decode_without_a_source_is_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match="--sources must be at least 1, not 0"):
        parse("decode", ["--dir", str(folder), "--sources", "0"])


@pytest.mark.parametrize(
    ("deal", "says"),
    [
        ("zigzag-by-length", "share of each request's length"),
        ("0,x", "ranks with commas between, not 0,x"),
        ("0,1,2", "ranks 0 to 1, and of no other"),
    ],
)
def test_a_deal_that_is_none_is_refused_at_the_start(deal: str, says: str, folder: Path) -> None:
    with pytest.raises((EngineError, LocalError), match=says):
        parse("decode", ["--dir", str(folder), "--tp", "2", "--dcp", "2", "--deal", deal])
