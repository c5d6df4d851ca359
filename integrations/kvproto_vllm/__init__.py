r"""kvproto for vLLM: a KV connector for prefill and decode engines, installed beside an unmodified vLLM.

    vllm serve MODEL --kv-transfer-config \
        '{"kv_connector": "KvprotoConnector", "kv_connector_module_path": "kvproto_vllm", ...}'

docs/vllm-reference.md says the rest.
"""

from typing import Any

from kvproto.distributions import check_versions

check_versions("kvproto-vllm")

__all__ = ["KvprotoConnector"]


def __getattr__(name: str) -> Any:
    """The connector, imported when vLLM asks for it: what needs no vLLM imports none."""
    if name != "KvprotoConnector":
        raise AttributeError(f"module 'kvproto_vllm' has no attribute {name!r}")
    from kvproto_engines import check_engine

    check_engine("vllm", "kvproto-vllm")
    from kvproto_vllm.connector import KvprotoConnector

    return KvprotoConnector
