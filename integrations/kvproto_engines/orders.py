"""Orders of the scheduler's side for each worker's side in a step, and the answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvproto import Prompt, Ticket

__all__ = ["Computed", "Load", "Orders", "Table", "Tables"]

Tables = tuple[list[int], ...]
"""A request's block ids from token 0 on, by block table."""


@dataclass(frozen=True)
class Table:
    """The page table of a group.

    Fields:
        index: Which block table of a request it is.
        pages: Of a block.
        window: Tokens of a block, where the engine gives up blocks that a sliding window has left; else 0.
        span: Tokens that a sliding window attends to, its own included; 0 without a window.
        chunk: Tokens of a chunk, of layers that attend to their own chunk alone; else 0.
        state: Whether its one block is the state of a request, or a ring.
        ring: Whether it is a ring: one of fewer rows has all that its engine needs, so it may fill one of more.
    """

    index: int
    pages: int = 1
    window: int = 0
    state: bool = False
    span: int = 0
    chunk: int = 0
    ring: bool = False

    def of(self, tables: Tables) -> list[int]:
        """The pages of a request, or its slot."""
        blocks, n = tables[self.index][: 1 if self.state else None], self.pages
        return blocks if n == 1 else [block * n + i for block in blocks for i in range(n)]

    def since(self, tables: Tables, following: int = 0) -> int:
        """The first token that has a block, or that token `following` attends to; earlier blocks are block 0."""
        blocks = tables[self.index] if self.window else []
        first = next(n for n, block in enumerate([*blocks, 1]) if block) * self.window
        wanted = following // self.chunk * self.chunk if self.chunk else following - self.span + 1 if self.span else 0
        return max(first, wanted if following else 0)


@dataclass
class Computed:
    """After this step tokens [0, `tokens`) of a request are in these blocks; `last`: prefill is over."""

    request: str
    tokens: int
    tables: Tables
    last: bool


@dataclass
class Load:
    """Tokens [`cached`, `tokens`) of a request are to be fetched into these blocks; none where the two are equal."""

    request: str
    ticket: Ticket
    prompt: Prompt
    tables: Tables
    cached: int
    tokens: int


@dataclass
class Orders:
    """Of one step.

    Fields:
        requests: Ticket and prompt of requests that are to be handed over, by their id.
        computed: What this step computes of them.
        preempted: Requests whose blocks the scheduler wants back, by the number of the preemption.
        failed: Why a request will not be handed over, by its id.
        held: Finished requests whose blocks wait for the word that they are free.
        taken: Source ranks that handed a request over, so that the others may release it.
        loads: What is to be fetched.
        spared: What this engine does not need of a source, so that it may free it.
        refused: Why a request cannot be fetched, and its blocks, by its id.
        aborted: Requests whose fetches are to stop.
    """

    requests: dict[str, tuple[Ticket, Prompt]] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)
    preempted: dict[int, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    spared: list[Load] = field(default_factory=list)
    refused: dict[str, tuple[str, Tables]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
