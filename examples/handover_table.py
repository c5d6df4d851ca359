"""Who owns what in each of the nine hand-overs of handovers.py, and why engines refuse it today.

`lay_out` states an engine whose caches are all divided alike. If a draft is divided differently from its target, the
Geometry is stated directly: a group for each cache, and for each rank the layers, heads and share of the tokens that it
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvproto import Cache, Geometry, Parallel, lay_out
from kvproto.planning.geometry import Group, Owns, Rank, gqa, mla, owns

PAGE, HEAD = 16, 32
"""Tokens per page, bytes per KV head."""


@attrs.frozen
class HandOver:
    """One case."""

    name: str
    what: str
    refused: str
    """Why: what engines require instead, according to their documentation or their assertions."""
    source: Geometry
    sink: Geometry
    tokens: int = 150
    """Length of the prompt, which is not a multiple of a page."""
    cached: int = 0
    """Tokens that the sink already has."""


def latent(layers: int = 4, **sizes: Any) -> Geometry:
    """An engine with multi-head latent attention."""
    return lay_out([Cache.mla("target", layers, latent=16, rope=8, page=PAGE)], Parallel(**sizes))


def grouped(layers: int = 4, heads: int = 2, **sizes: Any) -> Geometry:
    """An engine with grouped-query attention."""
    return lay_out([Cache.gqa("target", layers, kv_heads=heads, head_dim=HEAD // 2, page=PAGE)], Parallel(**sizes))


def stated(groups: Sequence[Group], ranks: Sequence[Sequence[Owns]]) -> Geometry:
    """A Geometry that states directly what each rank owns."""
    made = tuple(Rank(rank=i, owns=tuple(shares)) for i, shares in enumerate(ranks))
    return Geometry(replica=0, facts=(), groups=tuple(groups), ranks=made)


def _latent_target(cp_size: int = 1, interleave: int = 1) -> Group:
    return mla(0, "target", 0, 48, PAGE, cp_size=cp_size, interleave=interleave)


def _grouped_target(cp_size: int = 1, interleave: int = 1) -> Group:
    return gqa(0, "target", 0, 4, HEAD, PAGE, cp_size=cp_size, interleave=interleave)


def _draft(page: int) -> Group:
    return gqa(1, "draft", 1, 4, HEAD, page)


def sharded_draft() -> Geometry:
    """TP 2: both ranks hold the target's latent whole, and two of the draft's four KV heads each."""
    target, draft = _latent_target(), _draft(PAGE)
    ranks = [[owns(target, range(3)), owns(draft, [0], [(2 * r, 2 * r + 2)])] for r in range(2)]
    return stated([target, draft], ranks)


def wide_draft() -> Geometry:
    """DCP 4: the target's tokens in runs of a page; the draft whole on every rank, in pages 4 times as long."""
    target, draft = _latent_target(4, PAGE), _draft(4 * PAGE)
    return stated([target, draft], [[owns(target, range(3), cp_rank=r), owns(draft, [0])] for r in range(4)])


def draft_on_one() -> Geometry:
    """TP 2 whose draft runs on the first rank alone."""
    target, draft = _grouped_target(), _draft(PAGE)
    shares = [owns(target, range(3), [(2 * r, 2 * r + 2)]) for r in range(2)]
    return stated([target, draft], [[shares[0], owns(draft, [0])], [shares[1]]])


def draft_by_heads() -> Geometry:
    """TP 4, DCP 2: two ranks have the same heads of the target and share its tokens; each has one head of the draft."""
    target, draft = _grouped_target(2, 4), _draft(PAGE)
    ranks = []
    for r in range(4):
        half = 2 * (r // 2)
        ranks.append([owns(target, range(3), [(half, half + 2)], cp_rank=r % 2), owns(draft, [0], [(r, r + 1)])])
    return stated([target, draft], ranks)


HANDOVERS = (
    HandOver(
        "tp2-dcp4-draft",
        "TP 2 to DCP 4, with a GQA draft that is sharded at the source, and whole in longer pages at the sink",
        "A prefill rank that sends nothing of a latent target sends nothing of the draft either. Heads of the draft "
        "would be missing, so this is an error.",
        sharded_draft(), wide_draft(),
    ),
    HandOver(
        "pp4-dcp2", "PP 4 to DCP 2",
        "With DCP at the decode side, each prefill rank must hold the whole cache, not some of its layers or tokens.",
        latent(8, pp=4), latent(8, tp=2, dcp=2, interleave=PAGE),
    ),
    HandOver(
        "cp4-dcp4", "CP 4, tokens dealt in runs of 32, to DCP 4, tokens dealt one by one",
        "DCP at the decode side requires a prefill side without context parallelism.",
        latent(cp=4, interleave=32), latent(tp=4, dcp=4),
    ),
    HandOver(
        "dcp4-dcp2", "DCP 4, dealt in runs of a page, to DCP 2, dealt one by one",
        "If both sides have DCP, the sizes must be equal, or both must deal tokens in runs of one page.",
        latent(tp=4, dcp=4, interleave=PAGE), latent(tp=2, dcp=2),
    ),
    HandOver(
        "dcp4-tp2", "DCP 4 to TP 2, so that the sink holds all tokens on both ranks",
        "DCP at the prefill side requires an equal DCP at the decode side; engines that push support none at all.",
        latent(tp=4, dcp=4), latent(tp=2),
    ),
    HandOver(
        "gqa-tp2-tp8-dcp4", "GQA with two KV heads, TP 2 to TP 8 with DCP 4",
        "DCP is supported for latent attention only.",
        grouped(tp=2), grouped(tp=8, dcp=4, interleave=8),
    ),
    HandOver(
        "partial-dcp-prefix", "TP 1 to TP 4 with DCP 2, when the sink already has the first 37 tokens",
        "DCP must be 1 or all of TP, and a cached prefix must end at a page boundary.",
        latent(), latent(tp=4, dcp=2, interleave=4), cached=37,
    ),
    HandOver(
        "dcp3", "TP 2 to DCP 3",
        "DCP sizes and TP sizes of the two sides must divide one another.",
        latent(tp=2), latent(tp=3, dcp=3, interleave=PAGE),
    ),
    HandOver(
        "draft-apart", "TP 2 with the draft on one rank, to TP 4 with DCP 2 and a head of the draft on each rank",
        "Every rank must register as many buffers as its peer, so a rank without the draft has no peer; "
        "and DCP is supported for latent attention only.",
        draft_on_one(), draft_by_heads(),
    ),
)  # fmt: skip
"""All of them."""
