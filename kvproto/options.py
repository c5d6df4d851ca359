"""The settings of a Source or a Sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from kvproto.errors import LocalError, bad, check_type, type_name
from kvproto.transport.loading import find, names

if TYPE_CHECKING:
    from kvproto.transport.base import Transport
    from kvproto.transport.bench import Measured

Spread = Literal["even", "few", "one"]
"""The choice among ranks that hold the same bytes: all of them evenly, few, or as few as possible."""


def _must(holds: Callable[[Any], bool], expected: str) -> Any:
    """A validator that raises LocalError(OUT_OF_RANGE) for values for which `holds` does not return True."""

    def check(options: Options, field: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise bad(f"Options.{field.name}", expected, repr(value))

    return check


def _within(low: float, high: float, expected: str, kinds: Any = int | float) -> Any:
    return _must(lambda v: isinstance(v, kinds) and not isinstance(v, bool) and low <= v <= high, expected)


def _as_tuple(transports: str | Iterable[str | Transport]) -> tuple[str | Transport, ...]:
    check_type("Options.transports", transports, Iterable, "names of transports, or transports that you made")
    return (transports,) if isinstance(transports, str) else tuple(transports)


def _known(options: Options, field: attrs.Attribute[Any], transports: tuple[str | Transport, ...]) -> None:
    """Raise LocalError for a name that no installed package provides, or a value that is no transport."""
    for transport in transports:
        if not isinstance(transport, str) and not hasattr(transport, "capabilities"):
            raise bad("Options.transports", "names of transports, or transports that you made", type_name(transport))
        if isinstance(transport, str) and transport not in names():
            try:
                find(transport)
            except LocalError as error:
                raise error.at("Options.transports") from error


@attrs.frozen(kw_only=True)
class Options:
    """Settings of one Source or Sink; Hello and Welcome negotiate the settings on which both sides must agree.

    Raises LocalError: OUT_OF_RANGE for a value outside its range, NO_TRANSPORT for a transport that is not known here.

    Fields:
        transports: Names such as "cuda" or "nixl", or transports that you made, best first; empty: the best for the
            pool's memory.
        verify: Whether to compare a checksum of every group after each transfer, if the peer does as well (feature
            VERIFY). "pages" is for finding faults: if both sides set it, the error names the first layer and page
            whose checksums differ. It costs both sides a pass over their memory for each page.
        measured: Results of `kvproto probe` on this machine, by which transports given by name choose how to move runs
            of each length.
        spread: Which source ranks to read from if several hold the same bytes, if both sides set the same: "even"
            deals layers over all of them; "few" uses as few as possible while none sends more than twice what the
            busiest does with "even" (feature FEW_SOURCES); "one" uses the fewest, however much they send
            (feature SPREAD_ONE).
        eager: Sink: whether to greet a source and register memory with it on `connect`. Otherwise the first fetch does
            so, and a source that is never used costs neither side anything.
        cold_draft: Whether a sink may run a draft model whose cache the source does not have, if both sides set it: the
            draft starts cold, nothing of it is sent, and `Connected.plan.cold` names it (feature COLD_DRAFT). Otherwise
            such a source and sink refuse each other.
        pull: Whether the sink reads instead of the source writing, if both sides set it (feature PULL).
        keys: The folder with this engine's CURVE keys, made by `kvproto keygen`; every TCP address needs it.
        allow: Source, with keys: the file that lists the clients that may connect (None: allow.toml in `keys`). It is
            read again when it changes.
        insecure: Whether TCP may be used without keys, so that anyone who reaches the address can connect and
            eavesdrop.
        thread: Whether an I/O thread drives the session; without it, call `step` or use `kvproto.asyncio.drive`.
        callbacks: The function that runs callbacks, such as `loop.call_soon_threadsafe` or `executor.submit`; None: the
            I/O thread or `step` runs them.
        debug_pages: Source: whether to find pages that the engine changes between `finish` and the end of their copy.
            `finish` then takes a checksum of each layer and page, and waits for it; it is compared when the last copy
            to a sink is over. If one differs, the fetch is lost with VERIFY_FAILED, the request ends with Undelivered,
            and both name the group, the layer and the page.
        part_bytes: Source: the least number of bytes of computed rows to copy while prefill is still running.
        first_part_ratio: Source: copy the first part once it is this many times as large as the rows still to come;
            None: chosen for the link.
        ticket_wait: Seconds for which a fetch waits at the source for its `request`, the same on both sides; None: the
            limit of the spec. Make it longer if an engine reads requests only between long steps (KVP-TKT-EARLY).
        lease: Source, with pull: seconds for which a sink may read before it has to ask again.
        metrics: Whether to keep the counts that `metrics()` returns, at next to no cost; `kvproto.metrics` exports it.
        feed: The path at which to make a Unix socket for `kvproto top` and `kvproto tail`, in a directory that only
            this user can enter; "{rank}" and "{role}" are replaced, to tell ranks, or a Source and a Sink, apart. It is
            read-only, and turns `metrics` on.
        quarantine: Sink: the share of a group's pages, 0 to 1, that may wait for proof before `fetch` raises BUSY.
    """

    transports: tuple[str | Transport, ...] = attrs.field(default=(), converter=_as_tuple, validator=_known)
    verify: bool | Literal["pages"] = attrs.field(
        default=True, validator=_must(lambda v: isinstance(v, bool) or v == "pages", 'True, False or "pages"')
    )
    spread: Spread = attrs.field(
        default="even", validator=_must(lambda v: v in ("even", "few", "one"), '"even", "few" or "one"')
    )
    measured: Sequence[Measured] = ()
    eager: bool = True
    cold_draft: bool = False
    pull: bool = False
    keys: str | Path | None = None
    allow: str | Path | None = None
    insecure: bool = False
    thread: bool = True
    callbacks: Callable[[Callable[[], object]], object] | None = None
    debug_pages: bool = False
    part_bytes: int = attrs.field(
        default=16 << 20, validator=_within(1, 1 << 62, "a whole number of bytes, at least 1", int)
    )
    first_part_ratio: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_within(0, 1e9, "0 or more"))
    )
    ticket_wait: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_within(1e-3, 1e6, "seconds, at least 0.001"))
    )
    metrics: bool = False
    feed: str | Path | None = None
    lease: float = attrs.field(default=10.0, validator=_within(1e-3, 1e6, "seconds, at least 0.001"))
    quarantine: float = attrs.field(default=0.5, validator=_within(0, 1, "a share, 0 to 1"))

    def __attrs_post_init__(self) -> None:
        if self.insecure and self.keys is not None:
            raise bad("Options.insecure", "keys, or insecure", "both", "leave one out")
        if self.allow is not None and self.keys is None:
            raise bad("Options.allow", "keys as well", "none", "pass the keys too")
