"""Requests that are handed over while they compute: every row once, none before it is there, nothing freed too early."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import Options
from kvproto.copying.execute import execute
from kvproto.errors import LocalError, RemoteError
from kvproto.events import Disconnected, Expired, Over, Sent
from kvproto.source.node import SourceNode
from kvproto.source.prefill import Computed
from kvproto.source.progress import Available, CopyStep, SendProgress
from kvproto.transport.base import Move
from kvproto.transport.cuda.kernel import CopyJob, Prepared, Table, launch, sizes, table
from kvproto.transport.shm.transport import ShmCopy, ShmTransport
from kvproto.wire.enums import ErrorCode, Proof
from tests.node.any_two import FEW, AnyTwo, small_world
from tests.node.nodes import SOURCE, Received, TransferLost, ahead, finished, put
from tests.node.test_node import CONTENT, FIRST, TOKENS, Pair, check
from tests.plan import oracle
from tests.plan.programs import random_pairs
from tests.pools import column
from tests.session.driver import geometry, ticket

M = TypeVar("M", bound=ShmTransport)
LAYERS = {0: 3, 1: 1}
"""Of target and draft; their models and groups have the same numbers."""


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_parts_of_any_program_add_up_to_it(seed: int) -> None:
    rng = random.Random(seed)
    for program, from_lengths, to_lengths in random_pairs(rng):
        here = {i: memoryview(p) for i, p in oracle.noise(from_lengths, 1).items()}
        got, want = (oracle.noise(to_lengths, 2) for _ in range(2))
        regions = {i: memoryview(p) for i, p in got.items()}
        execute(program, here, {i: memoryview(p) for i, p in want.items()})
        progress, there, written = SendProgress(program), dict[tuple[int, int], Available](), 0
        ops = table(program, dict.fromkeys(here, 0), dict.fromkeys(regions, 0))
        layers = sorted({(int(op["model"]), int(op["layer"])) for op in program.ops})
        for _ in range(rng.randint(0, 8) if layers else 0):
            tokens = rng.randint(1, 30)
            for layer in rng.sample(layers, rng.randint(1, len(layers))):
                if tokens > there.get(layer, Available(0)).tokens:
                    there[layer] = Available(tokens)
            if rng.random() < 0.7:
                written += sum(run(ops, part, there, here, regions) for part in progress.next(program, there))
                progress.advance(there)
        written += sum(run(ops, part, None, here, regions) for part in progress.last(program, ()))
        assert written == program.bytes
        assert all(np.array_equal(got[i], want[i]) for i in got)


def run(ops: Table, part: CopyStep, there: dict[tuple[int, int], Available] | None, here: Any, regions: Any) -> int:
    """Execute a part; none of its rows may need a token that is not there, and a launch of the table writes as much."""
    work = CopyJob(Prepared(ops, 0), part.program.maps, part.layers)
    assert launch([work], np.zeros(sizes([work])[0], np.uint8), 0, 0).bytes == part.bytes
    program = part.program if part.layers is None else part.program.select(layers=range(*part.layers))
    for op in program.ops:
        rows = program.maps[op["map"]]
        if there is not None and rows.size:
            tokens = (int(rows.global_rows.max()) + 1) * program.tokens_per_row[op["map"]]
            assert tokens <= there[int(op["model"]), int(op["layer"])].tokens
    assert execute(program, here, regions) == part.bytes
    return part.bytes


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 0.5, 1, 2, 16]))
def test_a_part_is_due_when_it_is_as_much_as_what_is_to_come(seed: int, ratio: float) -> None:
    rng = random.Random(seed)
    for program, _, _ in random_pairs(rng):
        layers = sorted({(int(op["model"]), int(op["layer"])) for op in program.ops})
        asked = {model: (first := rng.randint(0, 9), first + rng.randint(0, 20)) for model in {m for m, _ in layers}}
        maps = [
            not m.whole and (not program.state_after or program.state_after[i] is None)
            for i, m in enumerate(program.maps)
        ]
        early = {(int(op["model"]), int(op["layer"])) for op in program.ops if maps[op["map"]]}
        wanted = {(layer, t) for layer in early for t in range(*asked[layer[0]])}
        progress, there, gone, n = SendProgress(program), dict[tuple[int, int], Available](), set[Any](), 0
        for _ in range(12 if layers else 0):
            layer = rng.choice(layers)
            there[layer] = Available(max(rng.randint(1, 30), there.get(layer, Available(0)).tokens))
            computed = {(layer, t) for layer, t in wanted if layer in there and t < there[layer].tokens}
            factor = min(ratio, 1) if n else ratio
            due = progress.due(there, asked, ratio)
            models = {model for model, _ in there}
            coming = {(layer, t) for layer, t in wanted - computed if layer[0] in models}
            assert due == (len(computed - gone) >= factor * len(coming))
            if due and rng.random() < 0.5:
                progress.advance(there)
                gone, n = computed, n + 1


def arrays(items: dict[int, list[int]]) -> dict[int, Any]:
    return {group: np.array(table, np.int64) for group, table in items.items()}


class Counting(ShmTransport):
    """Tells what each launch wrote, and whether more was being computed."""

    def __init__(self) -> None:
        self.prepared: set[int] = set()
        self.launches: list[int] = []
        self.background: list[list[bool]] = []

    def prepare(self, move: Move) -> None:
        assert move.program.bytes == 0
        assert super().start([move]).bytes == 0
        self.prepared.add(id(move.program.ops))

    def start(self, moves: Sequence[Move]) -> ShmCopy:
        assert {id(m.program.ops) for m in moves} <= self.prepared
        copy = super().start(moves)
        self.launches.append(copy.bytes)
        self.background.append([m.background for m in moves])
        return copy


@attrs.define(eq=False)
class Launch:
    """A copy that runs when the test says so."""

    bytes: int
    run: Callable[[], ShmCopy]
    over: bool = False
    error: LocalError | None = None
    stream: None = None

    @property
    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over

    def stop(self) -> Proof | None:
        if self.error is not None:
            return Proof.UNPROVABLE
        return Proof.PROVEN if self.over else None

    def end(self) -> None:
        self.run()
        self.over = True


class Device(ShmTransport):
    """Launches that take their time, and at most `room` of them at once."""

    capabilities = attrs.evolve(ShmTransport.capabilities, poll_interval=1e-3)

    def __init__(self, room: int = 4) -> None:
        self.launches: list[Launch] = []
        self.room = room

    def start(self, moves: Sequence[Move]) -> Any:
        if sum(not launch.over for launch in self.launches) >= self.room:
            raise LocalError(ErrorCode.BUSY, "", f"{self.room} launches", "one more")
        sizes = [m.program if m.layers is None else m.program.select(layers=range(*m.layers)) for m in moves]
        self.launches.append(Launch(sum(p.bytes for p in sizes), lambda: ShmTransport.start(self, moves)))
        return self.launches[-1]


class Prefill:
    """The engine of all source ranks: it writes rows of a layer when it has computed them, not before."""

    def __init__(self, pair: Pair, rng: np.random.Generator, deadline: float = 60.0) -> None:
        self.pair, self.ticket = pair, ticket(deadline)
        self.data = {g: rng.integers(0, 256, (12, 3, 4, 2, 40), np.uint8) for g in (0, 1)}
        self.items = {g: rng.permutation(12)[:3].tolist() for g in (0, 1)}
        self.key, self.rng = bytes(self.ticket.key), rng
        pair.sent = self.data, self.items
        for node in pair.sources:
            put(node.pool, 0xAA)
            node.expect(self.ticket, CONTENT, TOKENS)
        pair.ready()

    def compute(self, model: int, layers: tuple[int, int], first: int, end: int) -> None:
        for node in self.pair.sources:
            self._write(node, model, layers, first, end)
            # pages are allocated as the prompt goes on
            items = {g: i[: -(-end // 4)] if g == model else i for g, i in self.items.items()}
            node.computed(self.key, Computed(arrays(items), end, layers, model))

    def _write(self, node: SourceNode, model: int, layers: tuple[int, int], first: int, end: int) -> None:
        group, share = node.pool.layout.groups[model], node.pool.layout.shares[model]
        for layer in range(*layers):
            for p, part in enumerate(group.parts):
                span = next(s for s in share.lanes if s.part == p)
                view = column(node.pool, model, layer, part.name)
                for token in range(first, end):
                    item, row = self.items[model][token // 4], token % 4
                    lanes = self.data[model][item, layer, row, span.lo : span.hi, : part.lane_bytes]
                    view[item, row] = lanes + np.uint8(100 * p)

    def finish(self) -> None:
        for node in self.pair.sources:
            node.finish(self.key, finished(self.items, TOKENS, FIRST))

    def ask(self, sink: int) -> dict[int, list[int]]:
        items = {g: self.rng.permutation(12)[:3].tolist() for g in (0, 1)}
        self.pair.fetch(sink, self.ticket, CONTENT, TOKENS, items)
        self.wanted = items
        return items

    def asked(self, sink: int) -> dict[int, list[int]]:
        """Ask, until every source has heard it."""
        items = self.ask(sink)
        self.pair.until(lambda: all(node.asking(self.key) for node in self.pair.sources))
        return items


@contextlib.contextmanager
def pairs(folder: Path, source_tp: int, sink_tp: int, part_bytes: int = 1, **options: Any) -> Iterator[Pair]:
    made = Pair(folder, geometry(source_tp), geometry(sink_tp), part_bytes=part_bytes, **options)
    with contextlib.closing(made):
        yield made


@contextlib.contextmanager
def asked(folder: Path, mover: M, deadline: float = 60.0, **options: Any) -> Iterator[tuple[Pair, M, Prefill]]:
    """A pair whose parts go by this mover, and a request that its sink has asked for."""
    with pairs(folder, 1, 1, give=lambda: [mover], **options) as made:
        prefill = Prefill(made, np.random.default_rng(), deadline)
        prefill.asked(0)
        yield made, mover, prefill


def hand_over_at_random(made: Pair, rng: random.Random) -> None:
    """Chunks and layers of any number, sinks that ask at any time."""
    prefill = Prefill(made, np.random.default_rng())
    ends = [0, *sorted(rng.sample(range(1, TOKENS), rng.randint(0, 3))), TOKENS]
    steps = []
    for first, end in zip(ends, ends[1:], strict=False):
        for model, number in LAYERS.items():
            cuts = [0, *sorted(rng.sample(range(1, number), rng.randint(0, number - 1))), number]
            steps += [(model, layers, first, end) for layers in zip(cuts, cuts[1:], strict=False)]
    comes = [rng.randint(0, len(steps)) for _ in made.sinks]
    items: dict[int, dict[int, list[int]]] = {}
    for at, step in enumerate([*steps, None]):
        items |= {sink: prefill.ask(sink) for sink, when in enumerate(comes) if when == at}
        if step is not None:
            prefill.compute(*step)
        for _ in range(rng.randint(0, 3)):
            made.until(lambda: True)
    prefill.finish()
    made.until(lambda: made.count(Received) == len(made.sinks) and made.count(Over) == len(made.sources))
    check(made, [items[sink] for sink in range(len(made.sinks))])


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("part_bytes", [1, 700, 1 << 20])
def test_random_chunks_layers_and_sinks_that_come_late(
    tmp_path: Path, source_tp: int, sink_tp: int, part_bytes: int
) -> None:
    rng = random.Random()
    movers: list[Counting] = []

    def give() -> list[Counting]:
        movers.append(Counting())
        return [movers[-1]]

    with pairs(tmp_path, source_tp, sink_tp, part_bytes, give=give) as made:
        hand_over_at_random(made, rng)
        total = sum(sum(e.bytes.values()) for e in made.told if isinstance(e, Received))
        assert sum(sum(mover.launches) for mover in movers) == total


def test_what_is_computed_after_a_part_is_told_to_its_mover(tmp_path: Path) -> None:
    with asked(tmp_path, Counting()) as (made, mover, prefill):
        for layer in range(LAYERS[0]):
            prefill.compute(0, (layer, layer + 1), 0, TOKENS)
            made.until(lambda: len(mover.launches) > layer)  # noqa: B023
        assert mover.background == [[True]] * LAYERS[0]
        prefill.compute(1, (0, 1), 0, TOKENS)
        prefill.finish()
        made.until(lambda: made.count(Received) == 1)
        assert not any(mover.background[-1])
        check(made, [prefill.wanted])


def compute_some(made: AnyTwo, dice: random.Random) -> None:
    """Some layers of some tokens, when all sources are asked."""
    made.until(lambda: all(node.asking(made.key) for node in made.required))
    for tokens in sorted(dice.sample(range(1, FEW + 1), 3)):
        for model in {g.model for g in made.from_.groups}:
            for items, node in zip(made.held.values(), made.sources, strict=True):
                node.computed(made.key, Computed(arrays(items), tokens, (0, dice.randint(1, 6)), model))
            made.until(lambda: True)


@pytest.mark.parametrize("number", range(12))
def test_any_two_engines(tmp_path: Path, number: int) -> None:
    """Rings, state, deals and rows of several tokens: as if all were copied at the end."""
    dice = random.Random()
    movers: list[Counting] = []

    def give() -> dict[str, Any]:
        movers.append(Counting())
        return {"transports": movers[-1:], "part_bytes": 1}

    with contextlib.closing(AnyTwo(tmp_path, small_world(number), give)) as made:
        made.ask()
        compute_some(made, dice)
        early = sum(sum(mover.launches) for mover in movers)
        made.finish()
        (received,) = made.ends(Received, 1)
        made.check()
        assert received.checksums
        assert early <= sum(sum(mover.launches) for mover in movers) == sum(received.bytes.values())


def test_little_is_left_after_the_last_layer(tmp_path: Path) -> None:
    with asked(tmp_path, Counting()) as (made, mover, prefill):
        for first, end in ((0, 6), (6, TOKENS)):
            for layers in ((0, 2), (2, 3)):
                prefill.compute(0, layers, first, end)
                made.until(lambda: True)
        prefill._write(made.sources[0], 1, (0, 1), 0, TOKENS)
        prefill.finish()
        made.until(lambda: made.count(Received) == 1 and made.count(Sent) == 1)
        check(made, [prefill.wanted])
        target, draft = 40 * TOKENS, 2 * 2 * 16 * TOKENS
        assert mover.launches == [2 * 40 * 6, 40 * 6, 2 * 40 * 5, 40 * 5, draft]
        (sent,) = [e for e in made.told if isinstance(e, Sent)]
        assert (sent.left, sent.bytes) == (draft, {"target": 3 * target, "draft": draft})


@pytest.mark.parametrize(
    ("ratio", "sent"), [(0, [1, 1, 1, 1]), (0.5, [1, 1, 1, 1]), (1, [2, 1, 1]), (2, [2, 1, 1]), (3, [3, 1])]
)
def test_the_first_part_goes_late_and_what_is_left_is_halved(tmp_path: Path, ratio: float, sent: list[int]) -> None:
    """Three layers of the target; nothing is said of the draft's before the end."""
    with asked(tmp_path, Counting(), first_part_ratio=ratio) as (made, mover, prefill):
        for layer in range(LAYERS[0]):
            prefill.compute(0, (layer, layer + 1), 0, TOKENS)
            made.turn()
        prefill._write(made.sources[0], 1, (0, 1), 0, TOKENS)
        prefill.finish()
        made.until(lambda: made.count(Received) == 1)
        check(made, [prefill.wanted])
        layers = [40 * TOKENS] * 3 + [2 * 2 * 16 * TOKENS]
        assert mover.launches == [sum(layers[sum(sent[:i]) :][:n]) for i, n in enumerate(sent)]


def test_a_mover_says_how_late_its_link_lets_parts_be(tmp_path: Path) -> None:
    mover = Counting()
    mover.capabilities = attrs.evolve(mover.capabilities, first_part_ratio=1.0)
    with asked(tmp_path, mover) as (made, _, prefill):
        for layers, launches in (((0, 1), 0), ((1, 2), 1)):
            prefill.compute(0, layers, 0, TOKENS)
            made.until(lambda: True)
            assert len(mover.launches) == launches


@pytest.mark.parametrize("ratio", [-0.1, float("nan")])
def test_no_part_is_earlier_than_at_once(ratio: float) -> None:
    with pytest.raises(LocalError) as caught:
        Options(first_part_ratio=ratio)
    assert (caught.value.code, caught.value.path) == (ErrorCode.OUT_OF_RANGE, "Options.first_part_ratio")


def test_a_part_is_not_smaller_than_it_was_asked_to_be(tmp_path: Path) -> None:
    with asked(tmp_path, Counting(), part_bytes=800) as (made, mover, prefill):
        for first in range(TOKENS):
            prefill.compute(0, (0, 3), first, first + 1)
            made.until(lambda: True)
        prefill._write(made.sources[0], 1, (0, 1), 0, TOKENS)
        prefill.finish()
        made.until(lambda: made.count(Received) == 1)
        assert mover.launches == [7 * 120, 4 * 120 + 64 * TOKENS]


@pytest.mark.parametrize("finished", [False, True])
def test_an_abort_is_drained_when_every_part_is_over(tmp_path: Path, finished: bool) -> None:
    with asked(tmp_path, Device()) as (made, device, prefill):
        for layer in range(2):
            prefill.compute(0, (layer, layer + 1), 0, TOKENS)
            made.turn()
        if finished:
            prefill.finish()
            made.until(lambda: len(device.launches) == 3)
        number = len(device.launches)
        made.abort(0)
        made.until(lambda: not made.sources[0].asking(prefill.key))
        prefill.compute(0, (2, 3), 0, TOKENS)
        for launch in device.launches[::-1]:
            made.turns(5)
            assert not made.count(TransferLost)
            launch.end()
        assert made.lost() == (ErrorCode.ABORTED, True)
        assert len(device.launches) == number
        prefill.finish()
        made.until(lambda: made.count(Over) == 1)
        assert not made.sources[0]._copies.under_way


def test_a_busy_device_gets_every_part_later(tmp_path: Path) -> None:
    with asked(tmp_path, Device(room=1)) as (made, device, prefill):
        for model, number in LAYERS.items():
            for layer in range(number):
                prefill.compute(model, (layer, layer + 1), 0, TOKENS)
                made.until(lambda: True)
        assert len(device.launches) == 1
        device.launches[0].end()
        made.until(lambda: len(device.launches) == 2)
        prefill.finish()
        made.until(lambda: made.sources[0]._copies.under_way)
        device.launches[1].end()
        made.until(lambda: len(device.launches) == 3)
        device.launches[2].end()
        made.until(lambda: made.count(Received) == 1)
        check(made, [prefill.wanted])
        assert [launch.bytes for launch in device.launches] == [40 * TOKENS, (2 * 40 + 64) * TOKENS, 0]


def test_a_sink_that_goes_keeps_its_pages_mapped_and_the_request_unreleased(tmp_path: Path) -> None:
    with asked(tmp_path, Device()) as (made, device, prefill):
        prefill.compute(0, (0, 3), 0, TOKENS)
        made.until(lambda: len(device.launches) == 1)
        made.sinks.pop().close("over")
        prefill.finish()
        made.until(lambda: made.count(Disconnected) == 1)
        assert not made.count(Over)
        assert made.sources[0].reads(prefill.key)
        device.launches[0].end()  # would fault if the pages were not mapped
        made.until(lambda: made.count(Over) == 1)
        assert len(device.launches) == 1


def test_a_prompt_that_cannot_be_finished_is_lost_when_its_part_is_over(tmp_path: Path) -> None:
    with asked(tmp_path, Device()) as (made, device, prefill):
        prefill.compute(0, (0, 3), 0, 5)
        made.until(lambda: len(device.launches) == 1)
        node = made.sources[0]
        node.refuse(prefill.key, RemoteError(ErrorCode.INTERNAL, "", "out of pages", ""))
        made.turns(10)
        assert node.reads(prefill.key)
        assert not made.count(TransferLost | Over)
        device.launches[0].end()
        assert made.lost() == (ErrorCode.INTERNAL, True)
        assert not node.reads(prefill.key)
        (over,) = made.ends(Over, 1)
        assert bytes(over.request.ticket.key) == prefill.key
        node.computed(prefill.key, Computed(arrays(prefill.items), TOKENS, (0, 3)))  # said by an engine that is late
        made.turn()
        assert len(device.launches) == 1


def test_a_part_that_fails_ends_the_transfer_when_the_others_are_over(tmp_path: Path) -> None:
    with asked(tmp_path, Device()) as (made, device, prefill):
        for layer in range(2):
            prefill.compute(0, (layer, layer + 1), 0, TOKENS)
            made.turn()
        device.launches[0].error = LocalError(ErrorCode.TRANSPORT_FAILED, "", "a device", "a fault")
        made.turns(10)
        assert not made.count(TransferLost)
        device.launches[1].end()
        assert made.lost() == (ErrorCode.TRANSPORT_FAILED, False)


def test_an_expired_request_is_told_when_no_part_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asked(tmp_path, Device(), deadline=5) as (made, device, prefill):
        prefill.compute(0, (0, 3), 0, 5)
        made.until(lambda: len(device.launches) == 1)
        ahead(monkeypatch, 6, *SOURCE)
        made.turns(10)
        assert not made.count(Over)
        assert not made.count(TransferLost)
        device.launches[0].end()
        made.until(lambda: made.count(Over) == 1 and made.count(TransferLost) == 1)
        (lost,), (over,) = made.ends(TransferLost, 1), made.ends(Over, 1)
        assert isinstance(over, Expired)
        assert (lost.error.code, lost.proven) == (ErrorCode.DEADLINE, True)
