"""Needs of the engines' own connectors, by their words: `python -m tools.engines.own [ENVIRONMENT]`, of install.sh.

docs/engines_own.md has the rows. Each statement is printed with the line of the installed source that says it; exit status
1 where a release says it no longer.
"""

from __future__ import annotations

import sys
from pathlib import Path

_VLLM = "vllm-0.33.0/vllm/distributed/kv_transfer/kv_connector"
_OFFLOADING = "vllm-0.33.0/vllm/v1/kv_offload"
_SGLANG = "sgt/sglang/srt"
SAID = [
    ("releases", f"{_VLLM}/v1/nixl/metadata.py", '"vllm_version": vllm_version'),
    ("models", f"{_VLLM}/v1/nixl/metadata.py", '"model": model_config.model'),
    ("element types", f"{_VLLM}/v1/nixl/metadata.py", '"cache_dtype": str(cache_config.cache_dtype)'),
    ("element types", f"{_SGLANG}/disaggregation/common/conn.py", "Both servers must use the same --kv-cache-dtype value."),
    ("block sizes", f"{_VLLM}/utils.py", "assert self.block_size % remote_block_size == 0"),
    ("block sizes", f"{_SGLANG}/disaggregation/common/conn.py", "Both servers must use the same --page-size value."),
    ("layouts", f"{_VLLM}/v1/nixl/base_worker.py", '"Heterogeneous TP expects same kv_cache_layout (local "'),
    ("layouts", f"{_VLLM}/v1/nixl/base_worker.py", '"Heterogeneous TP head-dimension splitting requires contiguous heads. "'),
    ("tensor parallel", f"{_VLLM}/utils.py", 'f"Local tensor parallel size {self.tp_size} is not divisible "'),
    ("tensor parallel", f"{_VLLM}/v1/nixl/base_worker.py", "tp_ratio < 0 and self.transfer_topo.is_kv_replicated(remote_engine_id)"),
    ("tensor parallel", f"{_SGLANG}/disaggregation/nixl/conn.py", "does NOT support PD different TP sizes for non-MLA {st.upper()} hybrid models"),
    ("pipeline parallel", f"{_VLLM}/v1/nixl/base_worker.py", '"NixlPushConnector consumer (decode) does not support "'),
    ("pipeline parallel", f"{_VLLM}/v1/nixl/base_worker.py", '"> 1 with hybrid KV cache layouts (HMA); use NixlPushConnector "'),
    ("pipeline parallel", f"{_SGLANG}/disaggregation/common/conn.py", "should be equal to prefill pp size ({info.pp_size}) or 1"),
    ("context parallel", f"{_VLLM}/v1/nixl/base_worker.py", 'f"DCP sizes must divide one another: local={self.dcp_size}, "'),
    ("context parallel", f"{_SGLANG}/disaggregation/common/conn.py", '"PD decode DCP requires an MLA or hybrid-MLA KV pool."'),
    ("context parallel", f"{_SGLANG}/disaggregation/common/conn.py", '"PD decode DCP currently requires prefill attention CP=1, "'),
    ("drafts", f"{_VLLM}/v1/nixl/metadata.py", '"speculative_config": _get_speculative_compatibility_factors(vllm_config)'),
    ("state of Mamba", f"{_VLLM}/v1/nixl/base_worker.py", '"3-read Mamba conv transfer requires DS conv state layout. "'),
    ("tiers", f"{_OFFLOADING}/cpu/gpu_worker.py", "assert gpu_tensor.is_cuda or gpu_tensor.is_xpu"),
    ("tiers", f"{_OFFLOADING}/file_mapper.py", '"inference_engine": inference_engine,'),
    ("tiers", f"{_OFFLOADING}/file_mapper.py", '"tp_size": tp_size,'),
    ("tiers", f"{_SGLANG}/mem_cache/hicache_storage.py", "# TODO: Include KV dtype and stored layout in keys for both DCP and"),
    ("tiers", f"{_SGLANG}/mem_cache/hicache_storage.py", 'self.tp_config_suffix = f"_{model_name}_{tp_rank}_{tp_size}{shard_suffix}"'),
    ("what a request carries", f"{_VLLM}/v1/nixl/pull_scheduler.py", "remote_block_ids=block_ids,"),
    ("what a request carries", f"{_VLLM}/v1/nixl/pull_scheduler.py", "remote_host=self.side_channel_host,"),
    ("what a request carries", f"{_SGLANG}/managers/io_struct.py", "bootstrap_room: Optional["),
    ("packages", f"{_VLLM}/v1/nixl/base_worker.py", 'raise RuntimeError("NIXL is not available")'),
    ("packages", f"{_SGLANG}/disaggregation/nixl/conn.py", '"Please install NIXL by following the instructions at "'),
    ("packages", f"{_SGLANG}/distributed/device_communicators/mooncake_transfer_engine.py", '"Please install mooncake by following the instructions at "'),
]  # fmt: skip
"""The row of the page, a file of the environment, and what it says."""


def differences(at: Path, tell: bool = False) -> list[str]:
    """The statements that the installed releases do not make; with `tell`, print those that they do."""
    missing = []
    for row, file, text in SAID:
        lines = (at / file).read_text().splitlines()
        found = next((n for n, line in enumerate(lines, 1) if text in line), 0)
        if not found:
            missing.append(f"{row}: {file} does not say {text}")
        elif tell:
            print(f"{row:<24} {file}:{found}  {lines[found - 1].strip()}")
    return missing


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1] if len(sys.argv) > 1 else ".engines"), tell=True)
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)
