"""One vLLM in its own process, on the CPU, controlled over a pipe: for the tests of the connector."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8,
    "block_size": 32, "seed": 0, "kv_cache_memory_bytes": 8 << 20,
}  # fmt: skip


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """Open an engine, then step it and answer orders until the pipe is closed."""
    try:
        _serve(pipe, settings)
    except EOFError:
        pass
    except BaseException:
        pipe.send(("died", traceback.format_exc()))
    os._exit(0)


def _spoil(blocks: Any, compiled: Any) -> None:
    """Fill the blocks that are free with what is no number, as a request that went wrong may have left it there."""
    free = [block.block_id for block in blocks.free_block_queue.get_all_free_blocks()]
    for layer in compiled.static_forward_context.values():
        for tensor in layer.kv_cache if isinstance(layer.kv_cache, (list, tuple)) else [layer.kv_cache]:
            tensor[free] = float("nan")


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    import torch
    import vllm
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from tools.engines.vllm_corrupting import FETCHED

    torch.cpu._init_amx()  # where the machine has it, a process has to ask for its use
    vllm.__version__ = settings.pop("release", vllm.__version__)
    transfer = settings.pop("kv", None)
    if transfer is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    began = time.monotonic()
    engine = LLM(**SETTINGS | settings).llm_engine
    messages: list[str] = []
    handler = logging.Handler()  # after vLLM has configured its own
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.kvproto").addHandler(handler)
    logging.getLogger("vllm.kvproto").setLevel(logging.WARNING)  # what vLLM was told to show is errors alone
    _Steps(pipe, engine, messages, FETCHED).run(began)


def _envelope(hints: Any) -> Any:
    """vLLM's own structure of hints."""
    import msgspec
    from vllm.v1.kv_hints import KvHintsEnvelope

    return msgspec.convert(hints, KvHintsEnvelope)


class _Steps:
    """Steps of one engine, and the orders that it answers between them."""

    def __init__(self, pipe: Connection, engine: Any, messages: list[str], fetched: dict[str, float]) -> None:
        self.pipe, self.engine, self.core = pipe, engine, engine.engine_core.engine_core
        self.messages, self.fetched = messages, fetched
        self.preempted: dict[str, int] = {}
        """The number of preemptions of each request."""
        self.rounds: Counter[str] = Counter()
        """The number of steps in which each request had an output."""
        self.adapters: dict[tuple[str, str], int] = {}
        """The number that vLLM is to know each adapter by."""
        self.times: list[tuple[float, float]] = []
        """Seconds and CPU seconds of each step."""

    def run(self, began: float) -> None:
        """Report that the engine is ready, then step it until it is told to stop."""
        self.pipe.send(("ready", time.monotonic() - began))
        while True:
            busy = self.core.scheduler.has_requests()
            while self.pipe.poll(0 if busy else 0.05):
                name, *arguments = self.pipe.recv()
                if name == "stop":
                    self.core.shutdown()
                    return
                self._obey(name, arguments)
                busy = True
            self._step()

    def _obey(self, name: str, arguments: list[Any]) -> None:
        pipe, core = self.pipe, self.core
        match name:
            case "add":
                self._add(*arguments)
            case "abort":
                self.engine.abort_request(arguments)
            case "free":
                pool = core.scheduler.kv_cache_manager.block_pool
                pipe.send(("free", pool.get_num_free_blocks(), len(core.scheduler.requests)))
            case "forget":
                pipe.send(("forgot", self.engine.reset_prefix_cache()))
            case "preempted":
                pipe.send(("preempted", sum(self.preempted.values())))
            case "rounds":
                pipe.send(("rounds", self.rounds[arguments[0]]))
            case "said":
                pipe.send(("said", self.messages))
            case "steps":
                pipe.send(("steps", self.times))
                self.times = []
            case "spoil":
                _spoil(core.scheduler.kv_cache_manager.block_pool, core.vllm_config.compilation_config)
                pipe.send(("spoilt",))

    def _add(
        self, request: str, tokens: list[int], most: int, params: Any, logprobs: int = 0, more: Any = None
    ) -> None:  # fmt: skip
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        salt, lora = ((more or {}).get(name) for name in ("salt", "lora"))
        number = self.adapters.setdefault(tuple(lora), len(self.adapters) + 1) if lora else 0

        sampling = SamplingParams(
            temperature=0,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
            logprobs=logprobs or None,
        )
        prompt = {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
        known = {"lora_request": LoRARequest(lora[0], number, lora[1]) if lora else None}
        if hints := (more or {}).get("hints"):
            known["kv_hints"] = _envelope(hints)
        self.engine.add_request(request, prompt, sampling, **known)

    def _step(self) -> None:
        for request in self.core.scheduler.requests.values():
            if request.num_preemptions:
                self.preempted[request.request_id] = request.num_preemptions
        if self.engine.has_unfinished_requests():
            began, cpu = time.perf_counter(), time.thread_time()
            outputs = self.engine.step()
            self.times.append((time.perf_counter() - began, time.thread_time() - cpu))
            if not outputs:  # as vLLM's own loop does if no model was run
                time.sleep(0.001)
            for output in outputs:
                self.rounds[output.request_id] += 1
                if output.finished:
                    self._report(output)
        elif self.core.scheduler.has_requests():
            self.core.step_fn()
            time.sleep(0.001)

    def _report(self, output: Any) -> None:
        text = output.outputs[0]
        answer = list(text.token_ids), text.finish_reason, output.kv_transfer_params, output.num_cached_tokens
        seconds = {name.rpartition("-")[0]: time_ for name, time_ in self.fetched.items()}.get(output.request_id)
        logprobs = [{token: entry.logprob for token, entry in place.items()} for place in text.logprobs or ()]
        self.pipe.send(("done", output.request_id, *answer, seconds, logprobs))
