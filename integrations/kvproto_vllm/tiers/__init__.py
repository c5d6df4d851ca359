"""Pages of vLLM on the host and in storage, for engines of any kind that share it (docs/tiers.md).

* `connector`: vLLM's hooks.
* `finding`: the scheduler's side: which prompts are looked for, loaded and kept.
* `keeping`: a worker's side, over `kvproto.tiers.HostTiers`.
"""

from typing import Any

__all__ = ["KvprotoTiers"]


def __getattr__(name: str) -> Any:
    """The connector, imported when vLLM asks for it: what needs no vLLM imports none."""
    if name != "KvprotoTiers":
        raise AttributeError(f"module 'kvproto_vllm.tiers' has no attribute {name!r}")
    from kvproto_vllm.tiers.connector import KvprotoTiers

    return KvprotoTiers
