"""All scenarios; each module makes those of its subject known."""

from kvproto_conformance.live.scenarios import (  # noqa: F401 - in the order in which they run
    handovers,
    prefill_frames,
    prefill_registers,
    prefill_sessions,
    prefill_transfers,
)
