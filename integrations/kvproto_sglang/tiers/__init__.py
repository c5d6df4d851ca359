"""Storage of SGLang's HiCache for engines of any kind that share it (docs/tiers.md).

* `storage`: the back end, over `kvproto.tiers.StoredPages`.
* `keys`, `hooks`: HiCache's keys made page ids, and where SGLang asks for them.
* `host_pools`: how HiCache's pools of the host are stated.
"""

from typing import Any

__all__ = ["KvprotoTiers"]


def __getattr__(name: str) -> Any:
    """The back end, imported when SGLang asks for it: what needs no SGLang imports none."""
    if name != "KvprotoTiers":
        raise AttributeError(f"module 'kvproto_sglang.tiers' has no attribute {name!r}")
    from kvproto_sglang.tiers.storage import KvprotoTiers

    return KvprotoTiers
