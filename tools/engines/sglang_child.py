"""One SGLang in its own process, on the CPU, controlled over a pipe: for the tests of the back end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

SETTINGS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "skip_tokenizer_init": True, "dtype": "float32",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "max_total_tokens": 4096,
    "mem_fraction_static": 0.5, "log_level": "warning", "page_size": 32, "random_seed": 0,
    "sleep_on_idle": True,
}  # fmt: skip
HAND_OVER = {"disaggregation_transfer_backend": "kvproto", "disaggregation_decode_retraction_backup": "cpu_tensor"}


def serve(pipe: Connection, settings: dict[str, Any], kvproto: dict[str, Any]) -> None:
    """Open an engine, then answer orders until the pipe is closed."""
    os.setpgid(0, 0)  # what it starts ends with it
    os.environ["KVPROTO_SGLANG"] = json.dumps(kvproto)
    multiprocessing.set_start_method = lambda *args, **named: None  # its packages are here
    try:
        _serve(pipe, HAND_OVER | settings)
    except BaseException:
        pipe.send(("died", traceback.format_exc()))


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    import sglang

    began = time.monotonic()
    engine = sglang.Engine(**SETTINGS | settings)
    pipe.send(("ready", time.monotonic() - began))
    engine.loop.run_until_complete(_answer(pipe, engine))
    engine.shutdown()


async def _answer(pipe: Connection, engine: Any) -> None:
    tasks = set()
    while True:
        while not pipe.poll():
            await asyncio.sleep(0.005)
        try:
            name, *given = pipe.recv()
        except EOFError:
            return
        if name == "add":
            tasks.add(asyncio.create_task(_generate(pipe, engine, *given)))
        elif name == "abort":
            engine.tokenizer_manager.abort_request(rid=given[0])
        elif name == "free":
            counted = [state["counted"] for state in await engine.tokenizer_manager.get_internal_state()]
            pipe.send(("free", *map(sum, zip(*counted, strict=True))))
        else:
            return


async def _generate(
    pipe: Connection, engine: Any, request: str, tokens: list[int], most: int, more: dict[str, Any]
) -> None:  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True, **more.pop("sampling", {})}
    try:
        out = await engine.async_generate(input_ids=tokens, sampling_params=sampling, rid=request, **more)
        pipe.send(("done", request, list(out["output_ids"]), out["meta_info"]))
    except Exception as error:  # a request that failed is an exception here
        pipe.send(("done", request, [], {"finish_reason": {"type": "error", "message": str(error)}}))
