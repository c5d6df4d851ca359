"""The suite's own election: step 4 of planning.md and feature FEW_SOURCES, unit by unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Ranks = tuple[int, ...]
Unit = tuple[int, int, Ranks, int]
"""Sink group, layer, needy ranks, and the one of them that it is for."""
Elected = dict[tuple[Ranks, Unit], int]
"""The source of each unit of each set of candidates."""


class Piece(NamedTuple):
    """Bytes [lo, hi) of one part and layer, and one pair of token classes."""

    group: int
    layer: int
    part: int
    lo: int
    hi: int
    c: int
    d: int
    candidates: Ranks
    needy: Ranks


def elect(pieces: list[Piece], ordinal: int, features: Iterable[str]) -> list[dict[int, int]]:
    """For each piece: the source of each needy rank."""
    units: dict[Ranks, set[Unit]] = defaultdict(set)
    awaited: dict[int, set[int]] = defaultdict(set)
    for piece in pieces:
        for rank in piece.needy:
            if "SPREAD_ONE" in features or len(piece.needy) >= len(piece.candidates):
                awaited[rank].add(_in_order(piece, rank))
            else:
                units[piece.candidates].add((piece.group, piece.layer, piece.needy, rank))
    elected: Elected = {}
    for candidates in sorted(units, key=lambda some: (len(some), some)):
        numbered = sorted(units[candidates])
        if "FEW_SOURCES" in features:
            _few(candidates, numbered, ordinal, awaited, elected)
        else:
            for u, unit in enumerate(numbered):
                elected[candidates, unit] = candidates[(u + ordinal) % len(candidates)]
    return [
        {rank: elected.get((p.candidates, (p.group, p.layer, p.needy, rank)), _in_order(p, rank)) for rank in p.needy}
        for p in pieces
    ]


def _in_order(piece: Piece, rank: int) -> int:
    """Candidate j c div m of needy rank j."""
    return piece.candidates[piece.needy.index(rank) * len(piece.candidates) // len(piece.needy)]


def _few(candidates: Ranks, numbered: list[Unit], ordinal: int, awaited: dict[int, set[int]], elected: Elected) -> None:
    """Feature FEW_SOURCES for one set of candidates."""
    c, n = len(candidates), len(numbered)
    most = 2 * ((n + c - 1) // c)
    ranks = sorted({unit[3] for unit in numbered})
    runs: list[tuple[int, int, list[Unit]]] = []
    for rank in ranks:
        mine = [unit for unit in numbered if unit[3] == rank]
        a = (len(mine) + most - 1) // most
        for number in range(a):
            runs.append((rank, number, [unit for i, unit in enumerate(mine) if i * a // len(mine) == number]))
    load = dict.fromkeys(candidates, 0)
    for rank, _, some in sorted(runs, key=lambda run: (-len(run[2]), run[0], run[1])):
        begin = ranks.index(rank) * c // len(ranks) + ordinal
        round_ = [candidates[(begin + i) % c] for i in range(c)]
        known = [x for x in round_ if x in awaited[rank] and load[x] + len(some) <= most]
        chosen = min(known or round_, key=lambda x: load[x])
        load[chosen] += len(some)
        awaited[rank].add(chosen)
        for unit in some:
            elected[candidates, unit] = chosen
