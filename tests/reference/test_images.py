"""Images in an engine: where their rows go, whose pages they share, and how an encoder is divided."""

from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from kvproto import Parallel, lay_out
from kvproto_reference.cache import PageAllocator, Shard
from kvproto_reference.engine.admission import Admission
from kvproto_reference.engine.description import Layout, cache
from kvproto_reference.engine.images import AXIS, RUN, Image, RowPool, expected, shown
from kvproto_reference.engine.prefix import PrefixCache
from kvproto_reference.engine.runner import Chunk, seen_in
from kvproto_reference.engine.sequence import IMAGE, TokenSequence
from kvproto_reference.errors import EngineError
from kvproto_reference.models import TensorParallel
from kvproto_reference.models.encoder import Encoder, EncoderConfig

from .conftest import CONFIGS

CONFIG = EncoderConfig(width=48)
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


@attrs.frozen
class Summed(TensorParallel):
    """A rank whose sums are those of `total`, as the others would have them."""

    total: Callable[[Tensor], Tensor] = lambda x: x

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.total(x)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_shares_of_ranks_add_up_to_what_one_rank_computes(size: int) -> None:
    """After attention, and after the feed-forward block."""
    one = EncoderConfig(width=48, layers=1)
    sums: list[list[Tensor]] = []
    whole: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        whole.append(x)
        return x

    right = Encoder(one, Summed(total=note)).rows([PIXELS])
    for rank in range(size):
        mine: list[Tensor] = []

        def told(x: Tensor, mine: list[Tensor] = mine) -> Tensor:
            mine.append(x)
            return whole[len(mine) - 1]

        assert torch.allclose(Encoder(one, Summed(rank, size, total=told)).rows([PIXELS]), right, atol=1e-5)
        sums.append(mine)
    for nth, total in enumerate(whole):
        assert torch.allclose(sum(mine[nth] for mine in sums), total, atol=1e-5)


def test_weights_and_sizes_identify_an_encoder() -> None:
    others = [EncoderConfig(width=48, seed=1), EncoderConfig(width=48, heads=2), EncoderConfig(width=64)]
    assert len({config.fingerprint() for config in (CONFIG, EncoderConfig(width=48), *others)}) == 4


@pytest.mark.parametrize("size", [(0, 8), (8, 12), (4, 4)])
def test_an_image_that_patches_do_not_fill_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(EngineError, match="scale it to multiples of 8"):
        CONFIG.rows(*size)


def test_an_image_comes_as_it_was_sent() -> None:
    image = Image(PIXELS)
    assert Image.of_word(image.to_word()).digest == image.digest
    assert Image(PIXELS.transpose(1, 0, 2).copy()).digest != image.digest
    with pytest.raises(EngineError, match=r"send height \* width \* 3"):
        Image.of_word({**image.to_word(), "shape": [24, 39, 3]})


def test_encoder_and_prefill_have_one_prompt_if_the_image_is_as_large_as_it_says() -> None:
    image = Image(PIXELS)
    for rows, same in ((15, True), (14, False)):
        tokens = [5, *[IMAGE] * rows, 6]
        said = expected(TokenSequence(prompt=[*tokens], max_new=1, images=[image.digest]))
        assert (said.digest == shown(tokens, [image], CONFIG).digest) == same


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_stored_by_their_owners_alone(ranks: int) -> None:
    made = torch.arange(18.0)[:, None].expand(18, CONFIG.width)
    prompt = shown([1], [Image(PIXELS[:, :24])] * 2, CONFIG)
    assert prompt.axes == {AXIS: 18}
    held = []
    for rank in range(ranks):
        pool = RowPool(CONFIG, CONFIGS["gqa"], Parallel(tp=ranks, dcp=ranks, interleave=RUN), rank, 4)
        pool.tensor.fill_(-1)
        table = pool.take(prompt)
        assert table is not None
        pool.write(table, made)
        held += [int(row[0, 0]) for row in pool.tensor.flatten(0, 1) if row[0, 0] >= 0]
    assert sorted(held) == [*range(18)]


def test_more_rows_than_a_pool_has_are_refused() -> None:
    pool = RowPool(CONFIG, CONFIGS["gqa"], Parallel(), 0, 2)
    with pytest.raises(EngineError, match="need 3 pages of rows, the pool has 2"):
        pool.check(shown([1], [Image(PIXELS)] * 3, CONFIG))


def test_rows_stand_for_image_tokens_of_the_ranks_own() -> None:
    rows = torch.arange(3.0)[:, None]
    chunks = [Chunk([7, 8], 0, []), Chunk([9, IMAGE, IMAGE, 9, IMAGE], 4, [], seen=rows), Chunk([IMAGE], 3, [])]
    place, found = seen_in(chunks) or pytest.fail("there are some")
    assert place.tolist() == [3, 4, 6]
    assert found.flatten().tolist() == [0, 1, 2]
    place, found = seen_in(chunks, np.array([0, 4, 5, 6])) or pytest.fail("there are some")
    assert place.tolist() == [1, 3]
    assert found.flatten().tolist() == [1, 2]
    assert seen_in(chunks[:1]) is None


def test_pages_of_another_image_are_not_found() -> None:
    (group,) = lay_out([cache(0, CONFIGS["gqa"], Layout(), 4)]).groups
    kept = PrefixCache([PageAllocator(20, 1)], [Shard(group, 0)])

    def sequence(*images: bytes) -> TokenSequence:
        return TokenSequence(prompt=[1, IMAGE, IMAGE, 2, 3, 4, 5, 6, 7], max_new=2, images=images)

    first = sequence(b"red")
    assert kept.allocate(first, [3]) == 0
    kept.free(first, 8)
    for images, found in (((b"blue",), 0), ((), 0), ((b"red",), 8)):
        other = sequence(*images)
        assert kept.allocate(other, [3]) == found, images
        kept.free(other, 0)


def test_a_request_that_its_engine_forgets_when_it_gives_way_does_not_wait() -> None:
    (group,) = lay_out([cache(0, CONFIGS["gqa"], Layout(), 4)]).groups
    shard, pages = Shard(group, 0), PageAllocator(4, 1)
    prefixes = PrefixCache([pages], [shard])
    admission = Admission(prefixes, lambda rows: (shard.pages(rows),), 0, lambda pages: None)
    some = [TokenSequence(prompt=[*range(n, n + 8)], max_new=9, images=(b"red",)) for n in (0, 50)]
    assert admission.step(some[0]) == (4,)  # all at once
    for sequence in some:
        admission.add(sequence)
        assert prefixes.allocate(sequence, [2]) is not None
        admission.run(admission.begin())
        sequence.append([1])

    def forget(sequence: TokenSequence) -> None:
        prefixes.free(sequence, 0)
        admission.forget(sequence)

    admission.grow(forget)
    assert admission.running == some[:1]
    assert not admission.waiting
