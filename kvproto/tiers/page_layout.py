"""The components of a page, one for each group that a rank owns."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import attrs

from kvproto.errors import PlanError, bad
from kvproto.planning.deals import deal, owned_before
from kvproto.planning.geometry import Geometry, encode_geometry
from kvproto.planning.kinds import KINDS
from kvproto.wire.enums import ErrorCode, KeyForm, LengthRule
from kvproto.wire.messages import Group, Owns


@attrs.frozen
class PageComponent:
    """The share of one group in every page of a rank."""

    group: int
    form: KeyForm
    rule: LengthRule
    length: int
    """Bytes in a page."""
    reach: int | None = None
    """Tokens of a window."""


@attrs.frozen
class PageLayout:
    """The components of every page of one rank."""

    page: int
    """Tokens."""
    geometry: bytes
    """Digest of the record of what the rank owns."""
    components: tuple[PageComponent, ...]
    """The components, by ascending group."""

    @property
    def form(self) -> KeyForm:
        """The form of the ids that name its pages (KVP-TIER-AHEAD)."""
        return KeyForm.AHEAD if any(c.form is KeyForm.AHEAD for c in self.components) else KeyForm.OWN

    @property
    def required(self) -> frozenset[int]:
        """The groups that every page has."""
        return frozenset(c.group for c in self.components if c.rule is LengthRule.PREFIX)

    @property
    def lengths(self) -> dict[int, int]:
        """Bytes in a page, by group."""
        return {c.group: c.length for c in self.components}

    def component(self, group: int) -> PageComponent:
        """The component of a group; raises LocalError for a group without one."""
        for component in self.components:
            if component.group == group:
                return component
        raise bad("group", f"one of {[c.group for c in self.components]}", group)


def page_layout(
    geometry: Geometry, rank: int, page: int, ahead: Collection[int] = (), windows: Mapping[int, int] | None = None
) -> PageLayout:
    """The layout of pages of `page` tokens; raises PlanError for a page that cuts rows or turns (KVP-TIER-WHOLE)."""
    (own,) = (r for r in geometry.ranks if r.rank == rank)
    shares = {share.group: share for share in own.owns}
    components = tuple(
        _component(group, shares[group.id], page, group.id in ahead, (windows or {}).get(group.id))
        for group in geometry.groups
        if KINDS[group.kind].has_memory and group.id in shares
    )
    record = encode_geometry(single_rank(geometry, rank, [c.group for c in components]))
    return PageLayout(page, hashlib.sha256(record).digest(), components)


def _component(group: Group, share: Owns, page: int, ahead: bool, reach: int | None) -> PageComponent:
    if group.axis is not None:
        raise PlanError(ErrorCode.AXIS_MISMATCH, f"groups[{group.name}]", "rows of the prompt's tokens", group.axis)
    form = KeyForm.AHEAD if ahead else KeyForm.OWN
    rule = LengthRule.WINDOW if reach else LengthRule.PREFIX if KINDS[group.kind].paged else LengthRule.STATE
    length = _rows(group, share, page) * len(share.layers) * row_bytes(group, share)
    return PageComponent(group.id, form, rule, length, reach)


def row_bytes(group: Group, share: Owns) -> int:
    """The bytes of a row in one layer that a rank owns; raises PlanError for a group with an encoding."""
    if any(part.encoding for part in group.parts):
        raise PlanError(ErrorCode.LAYOUT_OPAQUE, f"groups[{group.name}]", "bytes that strides describe", "an encoding")
    return sum((lane.hi - lane.lo) * group.parts[lane.part].lane_bytes for lane in share.lanes)


def _rows(group: Group, share: Owns, page: int) -> int:
    """The rows of a page that a rank owns."""
    if not KINDS[group.kind].paged:
        return group.live_rows or group.rows
    step, origin = group.tokens_per_row, 0
    if group.cp_size > 1:
        run, origin = deal(group)
        step *= run * (group.cp_size if group.order is None else group.order.size)
    if page % step or origin:
        wants = f"a multiple of {step} tokens, and a deal from token 0"
        raise PlanError(ErrorCode.ROW_MISMATCH, f"groups[{group.name}]", wants, f"{page} tokens, from {origin}")
    return owned_before(group, share.cp_rank, page // group.tokens_per_row)


def single_rank(geometry: Geometry, rank: int, groups: Collection[int]) -> Geometry:
    """The Description of what one rank owns of some groups, as if it were the only rank (KVP-TIER-GEOMETRY)."""
    ranks = tuple(
        attrs.evolve(r, rank=0, owns=tuple(share for share in r.owns if share.group in groups))
        for r in geometry.ranks
        if r.rank == rank
    )
    owned = {share.group for r in ranks for share in r.owns}
    kept = tuple(g for g in geometry.groups if g.id in owned)
    return attrs.evolve(geometry, replica=0, facts=(), groups=kept, ranks=ranks)


def usable_lengths(component: PageComponent, page: int, has: Sequence[bool | int]) -> int:
    """The lengths, as bits, after which a request can continue, as a WINDOW or STATE component `has` its pages."""
    bits, run = 1, 0
    for n in range(1, len(has) + 1):
        run = run + 1 if has[n - 1] else 0
        first = n - 1 if component.reach is None else max(n * page - component.reach, 0) // page
        bits |= (run >= n - first) << n
    return bits
