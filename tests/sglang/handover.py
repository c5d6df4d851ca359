"""Two engines of SGLang's pools hand a prompt over by the back end's own parts, and every value is read back.

Pools are SGLang's own or those of `standins`: what is written and read goes by their methods. What a prompt has in each
layer and part is numbered by model, layer, token, head and element alone, so a value that lands elsewhere shows.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from kvproto import Options, Prompt, Sink, Source
from kvproto_engines.gpu import Gpu
from kvproto_sglang import metadata
from kvproto_sglang.engine import Engine, Layout, Opened, open_pool
from kvproto_sglang.receiving import Receiving
from kvproto_sglang.sending import Sending
from kvproto_sglang.settings import Settings
from kvproto_sglang.state import State
from kvproto_sglang.tickets import ticket_of
from tests.sglang.standins import buffers

TOKENS, SLOT, REQUEST_ROWS = 151, 3, 8
"""Tokens of the prompt, where each engine has its state, and for how many requests it has rows of other kinds."""
_SECONDS = 60


def server_of(**more: Any) -> Any:
    """SGLang's ServerArgs, as far as the back end looks."""
    known = {
        "model_path": "nobody/model", "revision": None, "quantization": None, "load_format": "auto", "random_seed": 0,
        "speculative_draft_model_path": "nobody/draft", "speculative_draft_model_revision": None,
    }  # fmt: skip
    return SimpleNamespace(**known | more)


def model_of(heads: int, layers: int = 4, swa_heads: int | None = None, **text: Any) -> Any:
    """SGLang's ModelConfig, as far as the back end looks."""
    return SimpleNamespace(
        num_hidden_layers=layers, get_total_num_kv_heads=lambda: heads,
        get_swa_num_kv_heads=lambda size: max(1, (swa_heads or heads) // size),
        hf_text_config=SimpleNamespace(rope_theta=1e4, **text),
    )  # fmt: skip


@attrs.frozen
class Model:
    """What the layers of a model are, over all ranks.

    Fields:
        heads: KV heads of layers with K and V; 1 of a latent.
        full: Layers that attend to all tokens, and the parts of each: element type and elements of a head.
        index: Layers with keys of an indexer, of so many elements.
        window: Layers with a sliding window of `tokens`, and their parts.
        states: Layers with a state. `conv` are the channels that ranks divide each on its own, and how many inputs are
            kept; `matrix` the heads, and the shape of the matrix of one.
        rows_first: Whether a convolution's inputs lie [input, channel].
        said: Whether SGLang says the channels; `named`: else the kind of states.
    """

    heads: int = 1
    full: Sequence[int] = ()
    parts: Sequence[tuple[str, torch.dtype, int]] = ()
    index: Sequence[int] = ()
    window: Sequence[int] = ()
    tokens: int = 0
    states: Sequence[int] = ()
    conv: tuple[tuple[int, ...], int] = ((), 0)
    matrix: tuple[int, int, int] = (0, 0, 0)
    rows_first: bool = False
    said: bool = False
    named: str = ""


@attrs.frozen
class Rows:
    """Rows of a part of a layer in a rank's buffers.

    Fields:
        at: Byte offsets in the buffer at which each lane of each row begins, [row, lane].
        size: Bytes of a lane.
        first: Which row of the prompt is the first; `which`: each of them, where others lie between.
        lanes: Of all ranks, and how many of them ranks before this one hold.
    """

    key: tuple[int, int, str]
    buffer: torch.Tensor
    at: torch.Tensor
    size: int
    first: int = 0
    which: torch.Tensor | None = None
    lanes: tuple[int, int] = (1, 0)

    @property
    def place(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of the buffer, and the index of each byte, [row, lane, byte]."""
        flat = self.buffer.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=self.buffer.device).set_(flat)
        begin = self.buffer.storage_offset() * self.buffer.element_size()
        return whole, (begin + self.at[..., None] + torch.arange(self.size)).to(whole.device)

    @property
    def content(self) -> torch.Tensor:
        """The bytes of the prompt that belong there."""
        model, layer, part = self.key
        seed = torch.Generator().manual_seed(100_000 * model + 1000 * layer + zlib.crc32(part.encode()) % 1000)
        whole = torch.randint(0, 256, (TOKENS, self.lanes[0], self.size), generator=seed, dtype=torch.uint8)
        lo = self.lanes[1] if self.lanes[1] < self.lanes[0] else 0
        mine = whole[:, lo : lo + self.at.shape[1]]
        return mine[self.which] if self.which is not None else mine[self.first : self.first + len(self.at)]


@attrs.define
class Side:
    """An engine: the pools of each rank, of the target and perhaps of a draft."""

    models: tuple[Model, ...]
    configs: tuple[Any, ...]
    ranks: list[tuple[Any, ...]]
    page: int
    states: tuple[str, ...] = ()
    buffers: Any = None
    exact: bool = True
    scales: tuple[Any, ...] = ({}, {})
    rows: Callable[["Side", int], Iterator[Rows]] | None = None
    slots_of: list[tuple[Any, ...]] = attrs.field(factory=list)
    dcp: int = 1
    row: int = attrs.field(init=False)
    """Of the request among rows for requests."""
    pages: list[int] = attrs.field(init=False)
    window: list[int] = attrs.field(init=False)
    """Of each page of the request the one that a window has; what has left the window has none."""

    def __attrs_post_init__(self) -> None:
        order = torch.randperm(-(-TOKENS // self.page), generator=torch.Generator().manual_seed(self.page))
        self.pages = [int(n) + 1 for n in order]
        self.window = [int(n) + 1 for n in order.flip(0)]
        self.row = 2 + self.page % 3

    def opened(self, rank: int, options: Options | None = None) -> Opened:
        drafts = sum(len(_buffers(_inner(pool))) for pool in self.ranks[rank][1:2])
        scales = (*self.scales, *[{}] * len(self.ranks[rank]))
        engine = Engine(
            self.ranks[rank], self.configs, server_of(), self.buffers, self.states, drafts, scales,
            self.models[0].tokens if self.exact else 0, self.slots_of[rank] if self.slots_of else (),
        )  # fmt: skip
        layout = Layout(len(self.ranks), rank, self.dcp)
        return open_pool(engine, layout, Settings(options=options or Options()), "all")

    def components(self, cached: int = 0) -> list[Any]:
        """What SGLang names of the request's state: as its `_swa_payload` and `_mamba_payload` do."""
        first = max(cached, TOKENS - self.models[0].tokens) // self.page
        found = {
            "swa": torch.tensor(self.window[first:]).numpy(),
            "mamba": [torch.tensor([SLOT]).numpy()],
            "dsa": torch.tensor(self.pages).numpy(),
            "qsa_pending": torch.tensor([self.row]).numpy(),
            "c128_state": self._request_state() if "c128_state" in self.states else None,
            "dsa_tail": [self.row, 0, TOKENS % 4, 0, 0, 4],
        }
        return [found.get(name) for name in self.states]

    def _request_state(self) -> Any:
        """As the pool of DeepSeek V4 says it: of the ratio that has rings of a request, where tokens are pending."""
        rings = [each for each in self.ranks[0][0].compress_state_pools if each is not None and each.request_scoped]
        ratio, ring = rings[0].ratio, rings[0].ring_size
        page = self.row * (ring // ratio) + (TOKENS - 1) % ring // ratio
        return torch.tensor([page] * bool(TOKENS % ratio)).numpy()

    def slots(self, window: bool) -> torch.Tensor:
        at = torch.arange(TOKENS)
        return torch.tensor(self.window if window else self.pages)[at // self.page] * self.page + at % self.page


def _buffers(pool: Any) -> list[Any]:
    if hasattr(pool, "swa_kv_pool") and not hasattr(pool, "full_kv_pool"):
        return []  # DeepSeek V4's draft has a window alone
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def content(number: int, layer: int, part: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What a model has there: whole numbers that each element type holds."""
    seed = 1000 * (100 * number + layer) + sum(map(ord, part))
    made = torch.randint(-8, 9, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return made.to(torch.uint8) if dtype == torch.uint8 else (made / 2).to(dtype)


def share(whole: torch.Tensor, axis: int, rank: int, ranks: int) -> torch.Tensor:
    """What a rank has of the lanes of an axis, of which consecutive ranks hold the same where they are fewer."""
    lanes = whole.shape[axis]
    lo = lanes * rank // ranks
    return whole.narrow(axis, lo, max(1, lanes // ranks))


def _inner(pool: Any) -> Any:
    return getattr(pool, "full_kv_pool", pool)


def _attention(
    pool: Any, model: Model, number: int, rank: int, ranks: int
) -> list[tuple[Any, int, int, str, torch.Tensor, bool]]:
    """Of each layer with pages: its pool, its numbers in the model and there, the part, and what this rank has of it by
    token; and whether a window is.
    """
    found = []
    for ids, inner, window in (
        (model.full, _inner(pool), False), (model.window, getattr(pool, "swa_kv_pool", None), True),
    ):  # fmt: skip
        for n, layer in enumerate(ids):
            for part, dtype, dim in model.parts:
                whole = content(number, layer, part, (TOKENS, model.heads, dim), dtype)
                found.append((inner, layer, inner.start_layer + n, part, share(whole, 1, rank, ranks), window))
    return found


def write(side: Side, rank: int) -> None:
    """Fill a rank's pools by SGLang's own methods, or where it says that rows lie."""
    ranks = len(side.ranks)
    if side.rows is not None:
        for rows in side.rows(side, rank):
            whole, at = rows.place
            whole[at] = rows.content.to(whole.device)
        return
    for number, (pool, model) in enumerate(zip(side.ranks[rank], side.models, strict=True)):
        halves: dict[tuple[int, int], list[torch.Tensor]] = {}
        for inner, _, n, _, rows, window in _attention(pool, model, number, rank, ranks):
            device = _buffers(inner)[0].device
            both = halves.setdefault((id(inner), n), [])
            both.append(rows.to(device))
            slots, layer = side.slots(window).to(device), SimpleNamespace(layer_id=n)
            if len(both) == len(model.parts):
                if getattr(inner, "dsa_kv_cache_store_fp8", False):
                    inner.kv_buffer[n - inner.start_layer][slots] = both[0]  # written by a kernel of a GPU alone
                else:
                    inner.set_kv_buffer(layer, slots, both[0], both[-1])
        for n, layer in enumerate(model.index):
            for part, width, view in index_of(_inner(pool), n):
                rows = content(number, layer, part, (TOKENS, width), torch.uint8).to(view.device)
                at = side.slots(False).to(view.device)
                view[at // side.page, at % side.page] = rows
        if model.states:
            pool.mamba_pool.load_cpu_copy(_states(model, number, rank, ranks), torch.tensor([SLOT]))


def differences(side: Side, rank: int) -> list[str]:
    """What a rank's pools do not hold, read by SGLang's own methods, or where it says that rows lie."""
    ranks, found = len(side.ranks), []
    if side.rows is not None:
        for rows in side.rows(side, rank):
            whole, at = rows.place
            if not torch.equal(whole[at].cpu(), rows.content):
                found.append(f"rank {rank}, {rows.key}")
        return found
    for number, (pool, model) in enumerate(zip(side.ranks[rank], side.models, strict=True)):
        for inner, layer, n, part, rows, window in _attention(pool, model, number, rank, ranks):
            asked, layer = (pool, layer) if hasattr(pool, "get_key_buffer") else (inner, n)
            held = asked.get_value_buffer(layer) if part == "v" else asked.get_key_buffer(layer)
            if held.dim() == 4:  # [page, head, token, dim]
                held = held.transpose(1, 2).flatten(0, 1)
            first = TOKENS - model.tokens if window else 0
            if not _same(held.view(rows.dtype)[side.slots(window).to(held.device)].cpu()[first:], rows[first:]):
                found.append(f"rank {rank}, model {number}, {part} of layer {layer}{' of a window' * window}")
        for n, layer in enumerate(model.index):
            for part, width, view in index_of(_inner(pool), n):
                at = side.slots(False).to(view.device)
                rows = content(number, layer, part, (TOKENS, width), torch.uint8)
                if not _same(view[at // side.page, at % side.page].cpu(), rows):
                    found.append(f"rank {rank}, model {number}, {part} of layer {layer}")
        if model.states:
            wanted, held = (_states(model, number, rank, ranks), pool.mamba_pool.get_cpu_copy(torch.tensor([SLOT])))
            for part, one, two in (("conv", wanted[0][0], held[0][0]), ("ssm", wanted[1], held[1])):
                if not _same(one, two):
                    found.append(f"rank {rank}, {part}")
    return found


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def index_of(pool: Any, n: int) -> list[tuple[str, int, torch.Tensor]]:
    """Keys of the n-th layer with an indexer, and their scales, [page, token, byte]."""
    held = [each for each in pool.index_k_with_scale_buffer if each.shape[0]]
    buffer, page, dim = held[n], pool.page_size, pool.index_head_dim
    return [
        ("index", dim, buffer[:, : page * dim].unflatten(1, (page, dim))),
        ("index_scale", 4, buffer[:, page * dim :].unflatten(1, (page, 4))),
    ]


def _states(model: Model, number: int, rank: int, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What a rank has of the states of all layers, as SGLang copies them to the host: [layer, slot, ...]."""
    conv, matrix = [], []
    for layer in model.states:
        blocks = [
            share(content(number, layer, f"conv{n}", (lanes, model.conv[1]), torch.bfloat16), 0, rank, ranks)
            for n, lanes in enumerate(model.conv[0])
        ]
        mine = torch.cat(blocks)
        conv.append(mine.t() if model.rows_first else mine)
        heads = content(number, layer, "ssm", model.matrix, torch.float32)
        matrix.append(share(heads, 0, rank, ranks) if heads.numel() else heads)
    return [torch.stack(conv).unsqueeze(1)], torch.stack(matrix).unsqueeze(1)


def stepped(side: int) -> Options:
    """Without threads, as `hand_over` steps; of the side that prefills, 0, or the other."""
    return Options(thread=False)


def hand_over(
    source: Side, sink: Side, place: str, options: Callable[[int], Options] = stepped, *,
    chunks: Sequence[int] = (64, TOKENS), late: Callable[[], Any] | None = None,
    spoil: Callable[[Side], None] | None = None,
) -> list[str]:  # fmt: skip
    """What the sink's pools do not hold of the prompt afterwards, or of its metadata; none: all of it is there.

    `place` has "{rank}" in it; `options` makes those of a rank of a side, 0 or 1. `late` writes the source's pools and gives an event of a GPU after which they are; `spoil`
    makes an error between.
    """
    prompt, ticket = Prompt(range(TOKENS)), ticket_of(77, "p")
    for side in (source, sink):
        side.buffers = side.buffers or buffers()
    chosen = [[options(n) for _ in side.ranks] for n, side in enumerate((source, sink))]
    opened = [
        [side.opened(rank, given) for rank, given in enumerate(each)]
        for side, each in zip((source, sink), chosen, strict=True)
    ]
    for rank in range(len(source.ranks)):
        write(source, rank)
    _fill(source.buffers)
    if spoil is not None:
        spoil(source)
    event = late() if late is not None else None
    first = {"p": place.replace("{rank}", "0")}
    sources = [Source("p", each.pool, place, given) for each, given in zip(opened[0], chosen[0], strict=True)]
    sinks = [Sink("d", each.pool, first, given) for each, given in zip(opened[1], chosen[1], strict=True)]
    sendings = [Sending(door, each.tables) for door, each in zip(sources, opened[0], strict=True)]
    receivings = [Receiving(door, each.tables, each.page) for door, each in zip(sinks, opened[1], strict=True)]
    try:
        for sending in sendings:
            sending.begin(ticket, prompt, TOKENS)
        for receiving, pools in zip(receivings, sink.ranks, strict=True):
            receiving.begin(ticket, prompt, TOKENS)
            receiving.resolve(0)
            ready = Gpu(torch.device(pools[0].device)).idle()
            receiving.fetch(sink.pages, 0, sink.components(), ready)
        before = 0
        for end in chunks:
            last = end == TOKENS
            end -= 0 if last else end % source.page
            pages = source.pages[before // source.page : -(-end // source.page)]
            for sending, each, pools in zip(sendings, opened[0], source.ranks, strict=True):
                names, written = each.parts, Gpu(torch.device(pools[0].device)).written(event)
                sending.send(
                    pages, end - before, lambda names=names: metadata.read(source.buffers, 1, names),
                    source.components() if last else None, written,
                )  # fmt: skip
            before = end
        _wait(sendings, receivings, (*sources, *sinks))
        arrived = receivings[0].arrived
        assert arrived is not None
        metadata.write(sink.buffers, 2, 77, arrived.handoff, None)
    finally:
        for door in (*sinks, *sources):
            door.close()
    found = [line for rank in range(len(sink.ranks)) for line in differences(sink, rank)]
    return found + _unlike(source.buffers, sink.buffers, opened[1][0].parts)


def _wait(sendings: list[Sending], receivings: list[Receiving], doors: Sequence[Any]) -> None:
    begun, over = time.monotonic(), {State.SUCCESS, State.FAILED}
    while any(each.state not in over for each in (*sendings, *receivings)):
        assert time.monotonic() - begun < _SECONDS, "it takes too long"
        for door in doors:
            door.step(0.001)
    errors = [str(each.error) for each in (*sendings, *receivings) if each.error is not None]
    assert not errors, errors


def _fill(made: Any) -> None:
    """Row 1, of all that may be handed over."""
    for n, part in enumerate(metadata.PARTS.values()):
        if (rows := getattr(made, part.buffer, None)) is not None:
            width = rows.shape[1] if part.whole else 1
            rows[1, :width] = (torch.arange(width) + n + 1).to(rows.dtype)


def _unlike(one: Any, two: Any, names: Sequence[str]) -> list[str]:
    """Parts of the metadata whose row differs from the source's."""
    found = []
    for name in names:
        part = metadata.PARTS[name]
        sent, came = getattr(one, part.buffer)[1], getattr(two, part.buffer)[2]
        if not torch.equal(sent if part.whole else sent[:1], came if part.whole else came[:1]):
            found.append(f"metadata {name}")
    return found
