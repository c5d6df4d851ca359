"""All scenarios; each module makes those of its subject known."""

from kvproto_conformance.live.scenarios import (  # noqa: F401 - in the order in which they run
    catalogue,
    decode_extensions,
    decode_hostile,
    decode_sessions,
    handovers,
    large,
    leases,
    prefill_endings,
    prefill_extensions,
    prefill_frames,
    prefill_negotiation,
    prefill_registers,
    prefill_sessions,
    prefill_transfers,
    pulls,
    restarts,
    staging,
    watching,
    watching_hostile,
)
