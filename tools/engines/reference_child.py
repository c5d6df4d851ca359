"""A reference engine, in torch or JAX, in a process of its own that takes the orders that `vllm_child` takes.

It prefills and decodes, one step for all requests at a time, and hands over as vLLM does: all but the last token of a
prompt, which the decode engine computes itself. JAX is not in the environment of the engines, so that one runs by
another Python: `PYTHON -m tools.engines.reference_child PIPE SETTINGS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from kvproto import (
    Fetch,
    Geometry,
    KvprotoError,
    Pool,
    Request,
    Sink,
    Source,
    lay_out,
    new_ticket,
    read_ticket,
    write_ticket,
)
from kvproto_engines.facts import rope_of
from kvproto_reference import checkpoint
from kvproto_reference.adapters import Adapters, adapters_of, chosen, load_adapters
from kvproto_reference.cache import KVPool, PageAllocator, Shard
from kvproto_reference.cache.memory import shareable
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.description import TARGET, Layout, cache, hand_over
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.runner import Chunk, Runner
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.sequence import TokenSequence, rows_needed
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.errors import EngineError

PAGES = 128
ROOT = Path(__file__).parents[2]


@attrs.define(eq=False)
class _Job:
    """A request: a prompt to hand over has `request`, one to fetch has `fetch`."""

    name: str
    sequence: TokenSequence
    request: Request | None = None
    fetch: Fetch | None = None
    cached: int = 0


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """Open an engine, then step it and answer orders until the pipe is closed; `python` is who runs it, if not we."""
    if python := settings.pop("python", ""):
        os.set_inheritable(pipe.fileno(), True)
        paths = os.pathsep.join(str(ROOT / each) for each in ("", "integrations", "reference"))
        command = [python, "-m", __name__, str(pipe.fileno()), json.dumps(settings)]
        os.execve(python, command, os.environ | {"PYTHONPATH": paths})
    try:
        torch.set_num_threads(1)
        _Served(pipe, settings).run()
    except EOFError:
        pass
    except BaseException:
        pipe.send(("died", traceback.format_exc()))
    os._exit(0)


def _in_torch(folder: Path, geometry: Geometry, rows: int, adapters: Adapters) -> tuple[Pool, Runner]:
    loaded = checkpoint.load(folder)
    cached = KVPool.allocate(loaded.config, PAGES, rows, memory=shareable)
    loras = load_adapters(adapters, loaded.config, loaded.tp)
    runner = torch_runner(loaded, cached, Shard(geometry.groups[0], 0), loras=loras)
    return hand_over(geometry, {TARGET: cached}, 0), runner


def _in_jax(folder: Path, geometry: Geometry, rows: int, adapters: Adapters) -> tuple[Pool, Runner]:
    from kvproto_reference.jax_engine.build import jax_runner

    if adapters:
        raise EngineError("adapters are torch's")
    pool = Pool.allocate(geometry, PAGES, rank=0)
    return pool, jax_runner(folder, [pool], TARGET, Layout())


_FRAMEWORKS = {"torch": _in_torch, "jax": _in_jax}


class _Served:
    def __init__(self, pipe: Connection, settings: dict[str, Any]) -> None:
        began, transfer = time.monotonic(), settings["kv"]
        extra = transfer["kv_connector_extra_config"]
        self.pipe, self.name, self.deadline = pipe, extra["name"], extra["deadline"]
        self.recompute = transfer["kv_load_failure_policy"] == "recompute"
        folder = Path(settings["model"])
        rope = rope_of(SimpleNamespace(**json.loads((folder / checkpoint.CONFIG_FILE).read_text())))
        facts = {"weights.target": extra["weights"], "rope.target": rope}
        rows, config = settings["block_size"], checkpoint.load_config(folder)
        geometry = lay_out([cache(0, config, Layout(), rows)], facts=facts)
        self.adapters = adapters_of({name: Path(each) for name, each in settings.get("adapters", {}).items()})
        framework = _FRAMEWORKS[settings.get("framework", "torch")]
        self.pool, self.runner = framework(folder, geometry, rows, self.adapters)
        self.source = Source(self.name, self.pool, extra["listen"])
        self.sink = Sink(self.name, self.pool, extra["sources"])
        self.prefiller, self.decoder = Prefiller(self.runner, None, 64), SpeculativeDecoder(self.runner)
        self.pages = PageAllocator(PAGES)
        self.jobs: dict[str, _Job] = {}
        self.held: list[_Job] = []
        self.free = self.pages.available
        pipe.send(("ready", time.monotonic() - began))

    def run(self) -> None:
        while True:
            busy = any(job.fetch is None for job in self.jobs.values())
            while self.pipe.poll(0 if busy else 0.005):
                name, *given = self.pipe.recv()
                if name == "add":
                    self.add(*given)
                elif name == "abort":
                    self.abort(given[0])
                elif name == "free":
                    self.pipe.send(("free", self.pages.available, len(self.jobs) + len(self.held)))
                elif name == "stop":
                    self.sink.close()
                    self.source.close()
                    return
                busy = True
            self.step()

    def add(
        self, name: str, tokens: list[int], most: int, params: Any, values: int = 0, more: Any = None
    ) -> None:  # fmt: skip
        given = more or {}
        sequence = TokenSequence(
            prompt=tokens,
            max_new=most,
            sampling=SamplingParams(ignore_eos=True),
            adapter=chosen(self.adapters, given["lora"][0]) if given.get("lora") else None,
            cache_salt=given.get("salt", ""),
        )
        pages = self.runner.shard.pages(rows_needed(len(tokens), most))
        sequence.tables = [self.pages.allocate(pages)]
        job = self.jobs[name] = _Job(name, sequence)
        if not params:
            self.prefiller.add(sequence)
            return
        known = params.get("ticket")
        ticket = read_ticket(known) if known else new_ticket(self.name, deadline=self.deadline)
        if params.get("do_remote_decode"):
            job.request = self.source.request(ticket, sequence.asked)
            self.prefiller.add(sequence)
        else:
            tables = {TARGET: sequence.tables[0]}
            job.fetch = self.sink.fetch(ticket, sequence.asked, tables, tokens=len(tokens) - 1)

    def abort(self, name: str) -> None:
        if (job := self.jobs.get(name)) is None:
            return
        if job.fetch is not None:
            job.fetch.abort()
            return
        self.prefiller.drop(job.sequence)
        if job.request is not None:
            job.request.fail("aborted")
        self.over(job, "abort")

    def step(self) -> None:
        """Take what has arrived, run a step of prefill and one of decode, and free pages that nobody reads any more."""
        for job in [job for job in self.jobs.values() if job.fetch is not None and job.fetch.done]:
            self.arrived(job)
        for sequence in self.prefiller.step():
            job = next(job for job in self.jobs.values() if job.sequence is sequence)
            if job.request is not None:
                job.request.finish({TARGET: sequence.tables[0][: self.runner.shard.pages(len(sequence.prompt))]})
        running = [job for job in self.jobs.values() if job.sequence.generated]
        self.decoder.step([job.sequence for job in running])
        for job in running:
            if job.sequence.finished:
                self.over(job, "length")
        for job in [job for job in self.held if job.request is not None and job.request.done]:
            self.held.remove(job)
            self.pages.free(job.sequence.tables[0])

    def arrived(self, job: _Job) -> None:
        """All but the last token is there, or will not be."""
        fetch, sequence = job.fetch, job.sequence
        assert fetch is not None
        try:
            assert fetch.result is not None
        except KvprotoError:
            if not fetch.pages_free:
                return
            job.fetch = None
            if self.recompute:
                self.prefiller.add(sequence)
            else:
                self.over(job, "error")
            return
        job.fetch, job.cached = None, len(sequence.prompt) - 1
        if job.name.startswith("corrupt"):
            part = self.pool.group(TARGET).parts[0].name
            self.pool.array(TARGET, 0, part)[sequence.tables[0][0], 0, 0, 3] ^= 0x40
        last = Chunk(sequence.prompt[-1:], job.cached, sequence.tables[0], adapter=sequence.adapter_name)
        logits = self.runner.run([last])
        sequence.append([int(logits.best()[0])])

    def over(self, job: _Job, reason: str) -> None:
        del self.jobs[job.name]
        params = None
        if job.request is not None:
            self.held.append(job)
            params = {"do_remote_prefill": True, "ticket": write_ticket(job.request.ticket)}
        else:
            self.pages.free(job.sequence.tables[0])
        self.pipe.send(("done", job.name, job.sequence.generated, reason, params, job.cached, bool(job.cached), None))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
