"""kvproto: the contract by which LLM prefill and decode engines hand over the KV cache.

An engine author states the caches (`Cache`, `Parallel`, `lay_out`), wraps the engine's tensors in a `Pool`, opens a
`Source` or a `Sink`, and hands over requests by `Ticket` and `Prompt`. `kvproto.events` lists what both report,
`kvproto.asyncio` runs them in an event loop, and `kvproto.errors` defines what they raise.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "errors": ("KvprotoError", "LocalError", "RemoteError"),
    "finder": ("Finder",),
    "net.addresses": ("Seed", "read_sources"),
    "options": ("Options",),
    "planning.cache": ("Block", "Cache"),
    "planning.deals": ("local_row", "most_before", "owned_before", "owner"),
    "planning.geometry": ("Geometry", "Group"),
    "planning.layout": ("Parallel", "lay_out"),
    "planning.plan": ("Plan", "plan"),
    "prompt": ("Prompt", "Ticket", "adapter_digest", "new_ticket", "read_ticket", "tenant_digest", "write_ticket"),
    "rank.handles": ("Withdrawal",),
    "rank.pool": ("Pool",),
    "sink": ("Fetch", "Sink"),
    "source": ("Request", "Source"),
    "tiers": ("Tiers",),
    "transport.memory": ("allocate",),
    "wire.enums": ("DType", "ItemKind"),
}
"""Public names by the module that defines them."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from kvproto.errors import KvprotoError, LocalError, RemoteError
    from kvproto.finder import Finder
    from kvproto.net.addresses import Seed, read_sources
    from kvproto.options import Options
    from kvproto.planning.cache import Block, Cache
    from kvproto.planning.deals import local_row, most_before, owned_before, owner
    from kvproto.planning.geometry import Geometry, Group
    from kvproto.planning.layout import Parallel, lay_out
    from kvproto.planning.plan import Plan, plan
    from kvproto.prompt import Prompt, Ticket, adapter_digest, new_ticket, read_ticket, tenant_digest, write_ticket
    from kvproto.rank.handles import Withdrawal
    from kvproto.rank.pool import Pool
    from kvproto.sink import Fetch, Sink
    from kvproto.source import Request, Source
    from kvproto.tiers import Tiers
    from kvproto.transport.memory import allocate
    from kvproto.wire.enums import DType, ItemKind

__all__ = [
    "Block", "Cache", "DType", "Fetch", "Finder", "Geometry", "Group", "ItemKind", "KvprotoError", "LocalError",
    "Options", "Parallel", "Plan", "Pool", "Prompt", "RemoteError", "Request", "Seed", "Sink", "Source", "Ticket",
    "Tiers", "Withdrawal", "__version__", "adapter_digest", "allocate", "lay_out", "local_row", "most_before",
    "new_ticket", "owned_before", "owner", "plan", "read_sources", "read_ticket", "tenant_digest", "write_ticket",
]  # fmt: skip


def __dir__() -> list[str]:
    """All public names, including those that have not been imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import kvproto` itself is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvproto' has no attribute {name!r}")
    found = getattr(import_module(f"kvproto.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
