"""Engines started by hand, one in each terminal."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproto_reference.demo.control import Line
from tests.demo.test_demo import TEXT, demo, report

Started = Any


def engine(role: str, *args: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"import sys; from kvproto_reference.commands import {role}; sys.exit({role}())"]
    return subprocess.Popen([*command, *map(str, args)], stderr=subprocess.PIPE, text=True)


@pytest.fixture
def start() -> Iterator[Started]:
    made: list[subprocess.Popen[str]] = []

    def begin(role: str, *args: str | Path) -> subprocess.Popen[str]:
        made.append(engine(role, *args))
        return made[-1]

    yield begin
    for process in made:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir(mode=0o700)
    return made


def wait_ready(folder: Path, name: str) -> None:
    """Until the engine answers."""
    line = Line(folder, name)
    line.send("hello")
    while not [word for word in line.receive() if word["op"] == "ready"]:
        line.socket.poll(100)
    line.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_a_misfit_is_refused_by_name_and_the_next_is_served(
    start: Started, folder: Path, tmp_path: Path, over: str
) -> None:
    address = ["--prefill", f"tcp://127.0.0.1:{free_port()}", "--insecure"] if over == "tcp" else []
    prefill = start("prefill", "--dir", folder, *address)
    wait_ready(folder, "prefill")
    misfit = start("decode", "--dir", folder, "--target", "gqa", *address)
    _, said = misfit.communicate(timeout=60)
    assert misfit.returncode == 1
    assert "prefill rank 0 refused decode: IDENTITY_MISMATCH at facts[weights.target]: prefill rank 0 has" in said
    assert ", decode has" in said
    start("decode", "--dir", folder, *address)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    for _ in range(2):
        result = demo("--attach", folder, "--prompt-file", prompts, "--json", "--max-new", "8")
        assert result.returncode == 0, result.stderr
        assert report(result)["identical"]
    prefill.terminate()
    _, said = prefill.communicate(timeout=20)
    assert "prefill rank 0 refused decode rank 0: IDENTITY_MISMATCH" in said


def test_address_in_use(start: Started, folder: Path) -> None:
    start("prefill", "--dir", folder)
    wait_ready(folder, "prefill")
    second = start("prefill", "--dir", folder)
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "in use" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prefill", "tcp://127.0.0.1:27712"], "--insecure"),
        (["--tp", "0"], "at least 1"),
        (["--pools", "jax"], "--transport cuda"),
        (["--transport", "pigeon"], "one of cuda, nixl, shm"),
        (["--devices", "0"], "--devices needs --transport cuda or nixl"),
        (["--draft", "/no/such/checkpoint"], "checkpoint folder /no/such/checkpoint does not exist"),
    ],
)
def test_bad_options_are_one_sentence(start: Started, folder: Path, args: list[str], says: str) -> None:
    process = start("prefill", "--dir", folder, *args)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert says in said
    assert "Traceback" not in said


def test_directory_that_others_may_enter(start: Started, folder: Path) -> None:
    folder.chmod(0o755)
    process = start("prefill", "--dir", folder)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, "mode 0700" in said) == (1, True)


def test_decode_that_is_killed_costs_prefill_nothing(start: Started, folder: Path, tmp_path: Path) -> None:
    start("prefill", "--dir", folder)
    wait_ready(folder, "prefill")
    first = start("decode", "--dir", folder)
    wait_ready(folder, "decode")
    first.kill()
    first.communicate(timeout=20)
    start("decode", "--dir", folder)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT)
    result = demo("--attach", folder, "--prompt-file", prompts, "--json", "--max-new", "8")
    assert json.loads(result.stdout)["identical"], result.stderr
