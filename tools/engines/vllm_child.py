"""One vLLM in its own process, on the CPU, controlled over a pipe: for the tests of the connector."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["serve"]

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
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from tools.engines.vllm_corrupting import FETCHED

    torch.cpu._init_amx()  # where the machine has it, a process has to ask for its use
    vllm.__version__ = settings.pop("release", vllm.__version__)
    transfer = settings.pop("kv", None)
    if transfer is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    began = time.monotonic()
    engine = LLM(**SETTINGS | settings).llm_engine
    said: list[str] = []
    handler = logging.Handler()  # after vLLM has configured its own
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.kvproto").addHandler(handler)
    core = engine.engine_core.engine_core
    pipe.send(("ready", time.monotonic() - began))
    preempted: dict[str, int] = {}
    rounds: Counter[str] = Counter()
    steps: list[tuple[float, float]] = []
    while True:
        busy = core.scheduler.has_requests()
        while pipe.poll(0 if busy else 0.05):
            name, *given = pipe.recv()
            if name == "add":
                request, tokens, most, params, *values = given
                sampling = SamplingParams(
                    temperature=0, max_tokens=most, ignore_eos=True, detokenize=False,
                    extra_args={"kv_transfer_params": params} if params else None, logprobs=values[0] if values else None,
                )  # fmt: skip
                engine.add_request(request, {"prompt_token_ids": tokens}, sampling)
            elif name == "abort":
                engine.abort_request(given)
            elif name == "free":
                pool = core.scheduler.kv_cache_manager.block_pool
                pipe.send(("free", pool.get_num_free_blocks(), len(core.scheduler.requests)))
            elif name == "forget":
                pipe.send(("forgot", engine.reset_prefix_cache()))
            elif name == "preempted":
                pipe.send(("preempted", sum(preempted.values())))
            elif name == "rounds":
                pipe.send(("rounds", rounds[given[0]]))
            elif name == "said":
                pipe.send(("said", said))
            elif name == "steps":
                pipe.send(("steps", steps))
                steps = []
            elif name == "spoil":
                _spoil(core.scheduler.kv_cache_manager.block_pool, core.vllm_config.compilation_config)
                pipe.send(("spoilt",))
            elif name == "stop":
                core.shutdown()
                return
            busy = True
        for request in core.scheduler.requests.values():
            if request.num_preemptions:
                preempted[request.request_id] = request.num_preemptions
        if engine.has_unfinished_requests():
            began, cpu = time.perf_counter(), time.thread_time()
            outs = engine.step()
            steps.append((time.perf_counter() - began, time.thread_time() - cpu))
            if not outs:  # as vLLM's own loop does where no model was run
                time.sleep(0.001)
            for out in outs:
                rounds[out.request_id] += 1
                if out.finished:
                    found = out.outputs[0]
                    answer = list(found.token_ids), found.finish_reason, out.kv_transfer_params, out.num_cached_tokens
                    seconds = {name.rpartition("-")[0]: s for name, s in FETCHED.items()}.get(out.request_id)
                    values = [{n: p.logprob for n, p in place.items()} for place in found.logprobs or ()]
                    pipe.send(("done", out.request_id, *answer, seconds, values))
        elif core.scheduler.has_requests():
            core.step_fn()
            time.sleep(0.001)
