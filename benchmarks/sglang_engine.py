"""An SGLang in processes of its own, for benchmarks/engines_gpu.py: batches of requests go in, tokens and times come back."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Engine", "Got", "of_pair", "plug_in"]


@attrs.frozen
class Got:
    """Of a request: its tokens, and how many tokens of its prompt were found on the device or the host, and in storage."""

    tokens: list[int]
    held: int
    stored: int


def plug_in(folder: str, small: bool) -> None:
    """Have every SGLang that starts from here find kvproto's plug-in, which is a folder and not installed; a `small` one on
    the CPU, where it is installed, that of the tests.
    """
    place = Path(folder) / "kvproto_benchmarks-0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: kvproto-benchmarks\nVersion: 0\n")
    plugin = "kvproto_bench = tools.engines.sglang_bench" if small else "kvproto = kvproto_sglang"
    (place / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin}:register\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, folder)


def serve(pipe: Any, settings: dict[str, Any]) -> None:
    """An engine: batches come over the pipe, and what became of them goes back, or the error of one that failed."""
    import sglang

    if settings.get("device") == "cpu":
        multiprocessing.set_start_method = lambda *args, **named: None
    engine = sglang.Engine(**settings)
    pipe.send(sglang.__version__)
    for prompts, most, more in iter(pipe.recv, None):
        sampling = {"temperature": 0.0, "max_new_tokens": most, "ignore_eos": True}
        began = time.perf_counter()
        try:
            answers = engine.generate(input_ids=prompts, sampling_params=sampling, **more)
        except Exception as error:  # SGLang raises where one of the requests has failed
            pipe.send(str(error))
            continue
        seconds = time.perf_counter() - began
        pipe.send(([_got(each) for each in answers], seconds))
    engine.shutdown()


def _got(answer: dict[str, Any]) -> Got:
    found = answer["meta_info"].get("cached_tokens_details") or {}
    held = found.get("device", 0) + found.get("host", 0)
    return Got(list(answer["output_ids"]), held, found.get("storage", 0))


class Engine:
    """One SGLang: a group of processes."""

    def __init__(self, name: str, settings: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        small = settings.get("device") == "cpu"
        if small:
            import sglang  # noqa: F401  # its processes share this; on a GPU nothing may be forked
        context: Any = multiprocessing.get_context("fork" if small else "spawn")
        self.name, self.log = name, log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_start, args=(theirs, settings, environment, str(log)))
        self._process.start()
        theirs.close()

    def send(self, prompts: list[list[int]], most: int = 1, **more: Any) -> None:
        """Ask for a batch; `more` are fields of requests."""
        self._pipe.send((prompts, most, more))

    def wait(self, seconds: float = 600) -> Any:
        """The next that it says; raises TimeoutError, or RuntimeError where it has ended or a batch has failed."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{self.name} says nothing")
        try:
            said = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} has ended: {self.log.read_text(errors='replace')[-1500:]}") from None
        return said

    def result(self) -> tuple[list[Got], float]:
        """Answers of the batch that was sent, and its seconds."""
        said = self.wait()
        if isinstance(said, str):
            raise RuntimeError(f"{self.name}: {said}")
        return said  # type: ignore[no-any-return]

    def run(self, prompts: list[list[int]], most: int = 1, **more: Any) -> tuple[list[Got], float]:
        self.send(prompts, most, **more)
        return self.result()

    def stop(self) -> None:
        """End all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join(20)


def _start(pipe: Any, settings: dict[str, Any], environment: dict[str, str], log: str) -> None:
    os.setpgid(0, 0)  # what it starts ends with it
    os.environ.update(environment)
    sys.path[:0] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    serve(pipe, settings)


def of_pair(at: int, place: str, options: dict[str, Any]) -> dict[str, str]:
    """The variable that tells prefill (`at` 0), or decode, where it listens or where prefill does."""
    own: dict[str, Any] = {"name": "prefill:1", "listen": f"{place}{{rank}}"}
    if at:
        own = {"name": "decode", "sources": {"prefill:1": f"{place}0"}}
    return {"KVPROTO_SGLANG": json.dumps(own | {"options": {"ticket_wait": 60, **options}})}
