"""HiCache's storage back end, as far as it needs no SGLang: its keys are page ids, and its pools of the host are stated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvproto import LocalError, Parallel, Pool, lay_out
from kvproto.tiers import Chain, StoredPages
from kvproto.tiers.page_ids import namespace
from kvproto_engines.memory import ShareableMemory
from kvproto_sglang.pools.stated import Owner
from kvproto_sglang.tiers.host_pools import state_host
from kvproto_sglang.tiers.keys import Keys, PageKeys

NAMES = {"weights.target": "test 1", "rope.target": "none", "dtype.target": "float32"}
SPACE, PAGE = namespace(NAMES), 4
TOKENS = list(range(100, 118))


def chain(*tokens: int) -> Chain:
    made = Chain(SPACE, PAGE)
    made.extend(tokens)
    return made


def test_keys_are_page_ids() -> None:
    keys = PageKeys(SPACE, PAGE)
    assert keys.of(TOKENS, 16, None, False) == chain(*TOKENS).own


def test_keys_of_a_longer_prompt_go_on_from_the_last() -> None:
    keys = PageKeys(SPACE, PAGE)
    first = keys.of(TOKENS[:8], 8, None, False)
    assert keys.of(TOKENS[8:16], 8, first[-1], False) == chain(*TOKENS).own[2:]


def test_keys_that_look_ahead_are_ids_of_that_form() -> None:
    keys = PageKeys(SPACE, PAGE)
    first = keys.of(TOKENS[:9], 8, None, True)
    assert first + keys.of(TOKENS[8:17], 8, first[-1], True) == chain(*TOKENS[:17]).ahead


def test_a_page_that_is_not_whole_has_a_key_of_no_page() -> None:
    keys = PageKeys(SPACE, PAGE)
    *whole, part = keys.of(TOKENS, 18, None, False)
    assert whole == chain(*TOKENS).own
    assert keys.chain([part]) is None


@pytest.mark.parametrize("ahead", [False, True])
def test_a_key_says_its_prompt(ahead: bool) -> None:
    keys = PageKeys(SPACE, PAGE)
    made = keys.of(TOKENS[: 16 + ahead], 16, None, ahead)
    found = keys.chain(made[2:])
    assert found is not None
    assert found[1] == 2
    assert found[0].space == SPACE
    assert (found[0].ahead if ahead else found[0].own) == made


def test_a_key_that_is_forgotten_says_nothing() -> None:
    keys = PageKeys(SPACE, PAGE, most=2)
    made = keys.of(TOKENS, 16, None, False)
    assert keys.chain(made[:1]) is None
    assert keys.chain(made) is None
    found = keys.chain(made[3:])
    assert found is not None
    assert found[0].space != SPACE  # so that no page of storage is one of it


def test_requests_with_names_of_their_own_have_other_keys() -> None:
    keys = Keys()
    keys.open(PageKeys(SPACE, PAGE), lambda more: namespace({**NAMES, **more}))
    assert keys.seed(None, None) is None
    seed = keys.seed(None, "tenant")
    assert seed is not None
    own = Chain(namespace(NAMES | {"salt": "tenant"}), PAGE)
    own.extend(TOKENS)
    assert keys.of(TOKENS, 8, bytes.fromhex(seed), False, PAGE) == [id.hex() for id in own.own[:2]]
    assert keys.seed("adapter", "tenant") not in (seed, keys.seed("adapter", None), None)


def test_a_user_s_extra_key_names_no_adapter() -> None:
    """It is a field of a request: whoever knows an adapter's digest could store rows of the plain model as that adapter's."""
    keys, digest = Keys(), "ab" * 32
    keys.open(PageKeys(SPACE, PAGE), lambda more: namespace({**NAMES, **more}))
    assert keys.seed(digest, None) != namespace(NAMES | {"adapter": digest}).hex()
    assert keys.seed("\ud800", "\ud800") is not None


# pools of the host

HEADS, DIM, LAYERS, PAGES = 2, 3, 2, 6
SHAPES = {
    "layer_first": (LAYERS, PAGES * PAGE, HEADS, DIM), "page_first": (PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE, HEADS, DIM), "page_head": (PAGES, HEADS, PAGE, LAYERS, DIM),
}  # fmt: skip
PLACES: dict[str, Any] = {
    "layer_first": lambda t, n, page, i: t[n, page * PAGE + i], "page_first": lambda t, n, page, i: t[page * PAGE + i, n],
    "page_first_direct": lambda t, n, page, i: t[page, n, i], "page_head": lambda t, n, page, i: t[page, :, i, n],
}  # fmt: skip
"""The row [head, dim] of a token of a page in one layer."""


class MHATokenToKVPoolHost:
    """As SGLang has it, as far as it is stated; the layers behind `target` are a draft's."""

    def __init__(self, layout: str, target: int = LAYERS, dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.head_num, self.head_dim, self.v_head_dim = HEADS, DIM, DIM
        self.start_layer, self.target_layer_num, self.layer_num = 0, target, LAYERS
        with ShareableMemory():
            self.kv_buffer = torch.zeros((2, *SHAPES.get(layout, (1,))), dtype=dtype)

    def row(self, part: int, layer: int, page: int, token: int) -> torch.Tensor:
        found: torch.Tensor = PLACES[self.layout](self.kv_buffer[part], layer, page, token)
        return found


class MLATokenToKVPoolHost:
    """The same of MLA."""

    def __init__(self, layout: str) -> None:
        self.layout, self.dtype, self.page_size, self.kv_cache_dim = layout, torch.float32, PAGE, DIM
        self.start_layer, self.target_layer_num, self.layer_num = 0, LAYERS, LAYERS
        shape = tuple(
            1 if size == HEADS and n == len(SHAPES[layout]) - 2 else size for n, size in enumerate(SHAPES[layout])
        )
        with ShareableMemory():
            self.kv_buffer = torch.zeros(shape, dtype=torch.float32)

    def row(self, part: int, layer: int, page: int, token: int) -> torch.Tensor:
        found: torch.Tensor = PLACES[self.layout](self.kv_buffer, layer, page, token)
        return found


def owner(number: int = 0) -> Owner:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
    return Owner(number, ("kv", "draft")[number], model, 1)


def opened(pool: Any, storage: Path, *drafts: Owner) -> StoredPages:
    stated = state_host(pool, owner(), *drafts)
    geometry = lay_out([each.cache for each in stated], Parallel())
    tensors = {each.cache.group.name: each.tensors for each in stated}
    axes = {each.cache.group.name: each.axes for each in stated}
    ahead = [group.name for group in geometry.groups if group.model]
    return StoredPages(Pool(geometry, tensors, axes=axes), NAMES, page=PAGE, storage=storage, ahead=ahead)


def value(part: int, layer: int, number: int, token: int) -> float:
    return 1000 * part + 100 * layer + 10 * number + token + 0.5


def filled(pool: Any, slots: list[int], parts: int = 2) -> None:
    for number, page in enumerate(slots):
        for part, layer, token in np.ndindex(parts, LAYERS, PAGE):
            pool.row(part, layer, page, token)[:] = value(part, layer, number, token)


def unlike(pool: Any, slots: list[int], parts: int = 2) -> list[tuple[int, ...]]:
    """Rows that are not as they were written."""
    return [
        (part, layer, number, token)
        for number, page in enumerate(slots)
        for part, layer, token in np.ndindex(parts, LAYERS, PAGE)
        if not (pool.row(part, layer, page, token) == value(part, layer, number, token)).all()
    ]


@pytest.mark.parametrize("theirs", list(SHAPES))
@pytest.mark.parametrize("ours", list(SHAPES))
def test_pages_of_one_layout_are_found_in_another(tmp_path: Path, ours: str, theirs: str) -> None:
    one, two = MHATokenToKVPoolHost(theirs), MHATokenToKVPoolHost(ours)
    filled(one, [4, 0, 2])
    assert opened(one, tmp_path).put(chain(*TOKENS), 0, [4, 0, 2]) == [True] * 3
    assert opened(two, tmp_path).get(chain(*TOKENS), 0, [1, 5, 3]) == 3
    assert unlike(two, [1, 5, 3]) == []


@pytest.mark.parametrize("theirs", list(SHAPES)[:3])
def test_latents_of_one_layout_are_found_in_another(tmp_path: Path, theirs: str) -> None:
    one, two = MLATokenToKVPoolHost(theirs), MLATokenToKVPoolHost("page_first")
    filled(one, [4, 0], 1)
    opened(one, tmp_path).put(chain(*TOKENS), 0, [4, 0])
    assert opened(two, tmp_path).get(chain(*TOKENS), 0, [1, 5]) == 2
    assert unlike(two, [1, 5], 1) == []


def test_a_draft_packed_behind_the_target_is_in_the_same_object(tmp_path: Path) -> None:
    one, two = MHATokenToKVPoolHost("page_first", 1), MHATokenToKVPoolHost("layer_first", 1)
    filled(one, [4, 0])
    pages = opened(one, tmp_path, owner(1))
    assert [each.cache.group.model for each in state_host(one, owner(), owner(1))] == [0, 1]
    pages.put(chain(*TOKENS), 0, [4, 0])
    assert opened(two, tmp_path, owner(1)).get(chain(*TOKENS), 0, [1, 5]) == 2
    assert unlike(two, [1, 5]) == []
    (first,) = (tmp_path / "o").rglob(f"{chain(*TOKENS).ahead[0].hex()}.*.1.*")
    first.unlink()
    assert opened(two, tmp_path, owner(1)).get(chain(*TOKENS), 0, [1, 5]) == 0  # nor the target without it


class MHATokenToKVPoolHostOfAnotherKind(MHATokenToKVPoolHost):
    pass


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (MHATokenToKVPoolHost("page_unified"), "hicache_mem_layout"),
        (MLATokenToKVPoolHost("page_head"), "hicache_mem_layout"),
        (MHATokenToKVPoolHost("layer_first", dtype=torch.uint8), "kv_cache_dtype"),
        (MHATokenToKVPoolHost("layer_first", 1), "layers of a draft"),
        (MHATokenToKVPoolHostOfAnotherKind("layer_first"), "host pool of the target"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(pool: Any, says: str) -> None:
    with pytest.raises(LocalError, match=says):
        state_host(pool, owner())
