"""What a page is made of: a component for each group of a Description, as one rank owns it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import attrs

from kvproto.errors import LocalError, PlanError
from kvproto.planning.deals import deal, owned_before
from kvproto.planning.geometry import Geometry, encode_geometry
from kvproto.planning.kinds import kind_of
from kvproto.wire.enums import ErrorCode, KeyForm, LengthRule
from kvproto.wire.messages import Group, Owns

__all__ = ["PageComponent", "PageLayout", "alone", "components"]


@attrs.frozen
class PageComponent:
    """One component of every page of a rank: its group, and how it counts."""

    group: int
    form: KeyForm
    rule: LengthRule
    length: int
    """Bytes of a page."""
    reach: int | None = None
    """Tokens of a window."""


@attrs.frozen
class PageLayout:
    """What all pages of one rank are made of."""

    page: int
    """Tokens."""
    geometry: bytes
    """Digest of what the rank owns."""
    parts: tuple[PageComponent, ...]
    """By ascending group."""

    @property
    def form(self) -> KeyForm:
        """The form by which its pages are found (KVP-TIER-AHEAD)."""
        return KeyForm.AHEAD if any(p.form is KeyForm.AHEAD for p in self.parts) else KeyForm.OWN

    @property
    def must(self) -> frozenset[int]:
        """Groups of which every page has a component."""
        return frozenset(p.group for p in self.parts if p.rule is LengthRule.PREFIX)

    def part(self, group: int) -> PageComponent:
        """That of a group; raises LocalError."""
        for each in self.parts:
            if each.group == group:
                return each
        raise LocalError(ErrorCode.OUT_OF_RANGE, "group", f"one of {[p.group for p in self.parts]}", str(group))


def components(
    geometry: Geometry, rank: int, page: int, ahead: Collection[int] = (), windows: Mapping[int, int] | None = None
) -> PageLayout:
    """The components of a rank's pages of `page` tokens; `ahead` are groups that look ahead, `windows` tokens by group.

    Raises PlanError for a page that cuts rows or turns, or a group whose bytes have no order (KVP-TIER-WHOLE).
    """
    kept = tuple(group for group in geometry.groups if kind_of(group).has_memory)
    (own,) = (r for r in geometry.ranks if r.rank == rank)
    shares = {share.group: share for share in own.owns}
    parts = tuple(
        _part(group, shares[group.id], page, group.id in ahead, (windows or {}).get(group.id))
        for group in kept
        if group.id in shares
    )
    record = encode_geometry(alone(geometry, rank, [part.group for part in parts]))
    return PageLayout(page, hashlib.sha256(record).digest(), parts)


def _part(group: Group, share: Owns, page: int, ahead: bool, reach: int | None) -> PageComponent:
    if group.axis is not None:
        raise PlanError(ErrorCode.AXIS_MISMATCH, f"groups[{group.name}]", "rows of the prompt's tokens", group.axis)
    form = KeyForm.AHEAD if ahead else KeyForm.OWN
    rule = LengthRule.WINDOW if reach else LengthRule.PREFIX if kind_of(group).paged else LengthRule.STATE
    return PageComponent(
        group.id, form, rule, _rows(group, share, page) * len(share.layers) * _row_bytes(group, share), reach
    )


def _row_bytes(group: Group, share: Owns) -> int:
    if any(part.encoding for part in group.parts):
        raise PlanError(ErrorCode.LAYOUT_OPAQUE, f"groups[{group.name}]", "bytes that strides describe", "an encoding")
    return sum((lane.hi - lane.lo) * group.parts[lane.part].lane_bytes for lane in share.lanes)


def _rows(group: Group, share: Owns, page: int) -> int:
    """Rows of a page that a rank owns."""
    if not kind_of(group).paged:
        return group.live_rows or group.rows
    step, origin = group.tokens_per_row, 0
    if group.cp_size > 1:
        run, origin = deal(group)
        step *= run * (group.cp_size if group.order is None else group.order.size)
    if page % step or origin:
        wants = f"a multiple of {step} tokens, and a deal from token 0"
        raise PlanError(ErrorCode.ROW_MISMATCH, f"groups[{group.name}]", wants, f"{page} tokens, from {origin}")
    return owned_before(group, share.cp_rank, page // group.tokens_per_row)


def alone(geometry: Geometry, rank: int, groups: Collection[int]) -> Geometry:
    """What a rank owns of some groups, as if it were alone (KVP-TIER-GEOMETRY)."""
    ranks = tuple(
        attrs.evolve(r, rank=0, owns=tuple(share for share in r.owns if share.group in groups))
        for r in geometry.ranks
        if r.rank == rank
    )
    named = {share.group for r in ranks for share in r.owns}
    kept = tuple(g for g in geometry.groups if g.id in named)
    return attrs.evolve(geometry, replica=0, facts=(), groups=kept, ranks=ranks)
