"""Checksums of single layers and pages, to find what differs (feature VERIFY_PAGES)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram
from kvproto.planning.kinds import KINDS
from kvproto.wire.messages import Group

__all__ = ["PageSums", "page_sums"]


@attrs.frozen(eq=False)
class PageSums:
    """Checksums of one group's share of a program, layer by layer."""

    layers: tuple[int, ...]
    pages: tuple[int, ...]
    """Numbers of the sink's pages, counted from the one that holds token 0; (0,) if rows cannot be told apart."""
    values: npt.NDArray[np.uint64]
    """Sums [layers * pages]."""

    def first_difference(self, others: npt.NDArray[np.uint64] | None) -> str:
        """The first layer and page whose sum differs from the other side's, in words; a missing sum differs."""
        if others is None or others.size != self.values.size:
            return f"{self.values.size} sums of pages wanted, {0 if others is None else others.size} came"
        wrong = np.flatnonzero(others != self.values)
        if not wrong.size:
            return "none of its pages differs"
        layer, page = divmod(int(wrong[0]), len(self.pages))
        return f"layer {self.layers[layer]}, page {self.pages[page]}; {wrong.size} of {self.values.size} differ"


def page_sums(
    program: CopyProgram, groups: Mapping[int, Group], checksums: Callable[[CopyProgram], Mapping[int, int]]
) -> Generator[None, None, dict[int, PageSums]]:
    """Compute the sums of each sink group that moves a row in a program, one of them in each step.

    `groups` are the sink's, by id. `checksums` returns those of a program by group, as transports do, and is called
    once for each layer and page. Clause KVP-VERIFY-PAGES.
    """
    sums = {}
    for id in np.unique(program.ops["group"]).tolist():
        ops = program.ops[program.ops["group"] == id]
        maps = [program.maps[i] for i in np.unique(ops["map"]).tolist()]
        rows = np.concatenate([m.global_rows for m in maps])
        if not rows.size:
            continue
        group, layers = groups[id], tuple(np.unique(ops["layer"]).tolist())
        apart = KINDS[group.kind].paged and not any(m.whole for m in maps)
        pages = tuple(np.unique(rows // group.rows).tolist()) if apart else (0,)
        step = group.rows * group.tokens_per_row
        values = []
        for layer in layers:
            of_layer = attrs.evolve(program, ops=ops[ops["layer"] == layer])
            for page in pages:
                part = of_layer.select(tokens=(page * step, (page + 1) * step)) if apart else of_layer
                values.append(checksums(part).get(id, 0))
                yield
        sums[id] = PageSums(layers, pages, np.array(values, np.uint64))
    return sums
