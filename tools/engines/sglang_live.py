"""Registrations of the decode ranks of a small fleet of SGLang: its own cache pools on the CPU, its own encoder.

    SGLANG_USE_CPU_ENGINE=1 ENGINE/python -m tools.engines.sglang_live CONFIG_FOLDER FILE LOG

ENGINE is an environment in which SGLang imports without CUDA. Of each rank the pool is made with that rank's heads, and
what the pool states of its buffers goes through the package's encoder. Grouped-query attention, TP 4, 16 tokens a page.
LOG gets the line in which a server logs its arguments.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_TP, _PAGE, _HEADS, _DIM, _LAYERS, _SLOTS = 4, 16, 8, 64, 3, 64


def main(argv: list[str]) -> int:
    """Write the capture; the exit status."""
    import torch
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    lines = []
    for rank in range(_TP):
        pool = MHATokenToKVPool(
            size=_SLOTS, page_size=_PAGE, dtype=torch.bfloat16, head_num=_HEADS // _TP, head_dim=_DIM, layer_num=_LAYERS,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        frames = _manager(MooncakeKVManager, pool, rank).build_receiver_registration_message()
        function = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.build_receiver_registration_message"
        release = importlib.metadata.version("sglang")
        record: dict[str, Any] = {
            "package": "sglang",
            "release": release,
            "backend": "mooncake",
            "message": "registration",
        }
        record |= {"function": function, "variant": "live", "frames": [f.hex() for f in frames]}
        lines.append(json.dumps(record) + "\n")
    Path(argv[1]).write_text("".join(lines))
    Path(argv[2]).write_text(_arguments(argv[0]))
    return 0


def _arguments(folder: str) -> str:
    from sglang.srt.entrypoints.engine import _server_args_for_logging
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(
        model_path=folder, tp_size=_TP, page_size=_PAGE, kv_cache_dtype="bf16", device="cpu", skip_tokenizer_init=True,
        disaggregation_mode="decode", disaggregation_transfer_backend="mooncake",
    )  # fmt: skip
    return f"server_args={_server_args_for_logging(made)}\n"


def _manager(cls: Any, pool: Any, rank: int) -> Any:
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    buffers = SimpleNamespace(
        engine_rank=rank, kv_data_ptrs=pointers, kv_data_lens=lengths, kv_item_lens=items, aux_data_ptrs=[], kv_layer_ids=[],
        state_data_ptrs=[], state_item_lens=[], state_layer_ids=[],
    )  # fmt: skip
    made = object.__new__(cls)
    for name, value in {
        "kv_args": buffers, "local_ip": "10.0.7.2", "rank_port": 41_870 + rank, "attn_tp_size": _TP, "dcp_size": 1,
        "dcp_rank": 0, "enable_staging": False, "engine": SimpleNamespace(get_session_id=lambda: f"10.0.7.2:{15_730 + rank}"),
    }.items():  # fmt: skip
        setattr(made, name, value)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
