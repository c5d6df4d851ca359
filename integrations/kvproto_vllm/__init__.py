r"""kvproto for vLLM: KV connectors, installed beside an unmodified vLLM.

`KvprotoConnector` hands prompts over between prefill and decode engines, and `KvprotoTiers` keeps pages on the host and
in storage.

    vllm serve MODEL --kv-transfer-config \
        '{"kv_connector": "KvprotoConnector", "kv_connector_module_path": "kvproto_vllm", ...}'

docs/vllm-reference.md and docs/tiers.md say the rest.
"""

from importlib import import_module
from typing import Any

__all__ = ["KvprotoConnector", "KvprotoTiers"]

_HOMES = {"KvprotoConnector": "connector", "KvprotoTiers": "tiers"}


def __getattr__(name: str) -> Any:
    """A connector, imported when vLLM asks for it: what needs no vLLM imports none."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvproto_vllm' has no attribute {name!r}")
    return getattr(import_module(f"kvproto_vllm.{_HOMES[name]}"), name)
