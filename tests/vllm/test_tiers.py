"""vLLM's tiers: what the scheduler's side tells workers in each step, and what a worker does of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import Cache, DType, LocalError, Pool, adapter_digest, lay_out
from kvproto.tiers import HostTiers
from kvproto_engines.memory import only_context
from kvproto_engines.tiers import names_of
from kvproto_vllm.tiers.finding import Finding, Keep, Look, Place, TierOrders, TierSettings, merged
from kvproto_vllm.tiers.keeping import Keeping
from tests.vllm.adapters import adapter

PAGE = 16
PROMPT = list(range(100, 200))
TABLE = [7, 3, 5, 1, 9, 8, 6]
SETTINGS = TierSettings(storage="/kv", prefetch_threshold=32)


def request(name: str = "a", tokens: Any = PROMPT, **more: Any) -> Any:
    """What vLLM calls a request, as far as the tiers look."""
    made = {
        "request_id": name, "prompt_token_ids": tokens, "num_prompt_tokens": len(tokens or []), "lora_request": None,
        "mm_features": [], "prompt_embeds": None, "cache_salt": None, "skip_reading_prefix_cache": False,
        "all_token_ids": list(tokens or []),
    }  # fmt: skip
    return SimpleNamespace(**made | more)


def finding(workers: int = 1, ahead: bool = False, most: int = 1000, **settings: Any) -> Finding:
    return Finding(attrs.evolve(SETTINGS, **settings), PAGE, workers, ahead, most)


def step(made: Finding, *, new: Any = (), cached: Any = (), computes: int = 0) -> TierOrders:
    """A step of vLLM's scheduler: (request, tokens computed before) of new and of known requests."""
    known = SimpleNamespace(req_ids=[name for name, _ in cached], num_computed_tokens=[n for _, n in cached])
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new],
        scheduled_cached_reqs=known, num_scheduled_tokens={name: computes for name, _ in (*new, *cached)},
    )  # fmt: skip
    return made.orders(output, lambda name: (TABLE,))


def test_a_request_is_looked_for_when_it_comes_and_loaded_when_all_workers_have_answered() -> None:
    made, asked = finding(workers=2), request()
    made.arrived(asked)
    assert made.matched(asked, 0) == (None, False)
    assert step(made) == TierOrders(looks=[Look("a", PROMPT, {})])
    made.answered({"a": (5, 1)})
    assert made.matched(asked, 0) == (None, False)
    made.answered({"a": (4, 1)})
    assert made.matched(asked, 16) == made.matched(asked, 16) == (48, True)
    made.allocated(asked, (TABLE[:4],), 48)
    assert step(made).places == [Place("a", 1, [3, 5, 1])]
    made.allocated(asked, (TABLE,), 0)  # vLLM calls again when they are there
    assert made.matched(asked, 0) == (0, False)
    assert step(made) == TierOrders()


def test_the_last_token_is_always_computed() -> None:
    made, asked = finding(), request(tokens=PROMPT[:64])
    made.arrived(asked)
    made.answered({"a": (4, 1)})
    assert made.matched(asked, 0) == (48, True)


def test_what_the_device_has_is_not_loaded() -> None:
    made, asked = finding(), request()
    made.arrived(asked)
    step(made)
    made.answered({"a": (3, 1)})
    assert made.matched(asked, 48) == (0, False)
    assert step(made) == TierOrders(dropped=["a"])


def test_what_the_device_has_whole_is_not_waited_for() -> None:
    """In its first step already: before workers know of it, and after."""
    made, asked = finding(), request()
    made.arrived(asked)
    assert made.matched(asked, 96) == (0, False)
    assert step(made) == TierOrders()
    [keep] = step(made, new=[("a", 0)], computes=96).keeps
    assert keep.tokens == PROMPT
    made, asked = finding(), request()
    made.arrived(asked)
    step(made)
    assert made.matched(asked, 96) == (0, False)
    assert step(made) == TierOrders(dropped=["a"])


def test_another_connector_may_load_instead() -> None:
    made, asked = finding(), request()
    made.arrived(asked)
    step(made)
    made.answered({"a": (3, 1)})
    made.allocated(asked, (TABLE,), 0)
    assert step(made) == TierOrders(dropped=["a"])


@pytest.mark.parametrize(
    "other",
    [
        {"mm_features": ["an image"]}, {"prompt_token_ids": None}, {"prompt_embeds": "some"},
        {"prompt_token_ids": PROMPT[:20], "all_token_ids": PROMPT[:20]}, {"skip_reading_prefix_cache": True},
    ],
)  # fmt: skip
def test_requests_that_are_not_looked_for(other: dict[str, Any]) -> None:
    made, asked = finding(), request(**other)
    made.arrived(asked)
    assert made.matched(asked, 0) == (0, False)
    assert step(made) == TierOrders()


def test_too_much_is_not_read_at_once() -> None:
    made, one, two = finding(most=150), request("one"), request("two")
    made.arrived(one)
    made.arrived(two)
    assert [look.request for look in step(made).looks] == ["one"]
    made.answered({"one": (3, 1)})
    assert made.matched(two, 0) == (0, False)  # the other's pages are still held
    three = request("three")
    made.arrived(three)
    made.allocated(one, (TABLE,), 48)
    assert made.matched(three, 0) == (None, False)
    assert [look.request for look in step(made).looks] == ["three"]


def test_best_effort_takes_what_has_come_when_the_turn_does() -> None:
    made, asked = finding(prefetch_policy="best_effort"), request()
    made.arrived(asked)
    assert step(made).hurried == []
    made.matched(asked, 0)
    made.matched(asked, 0)
    assert step(made).hurried == ["a"]


def test_pages_are_kept_as_steps_complete_them() -> None:
    made, asked = finding(), request()
    made.arrived(asked)
    step(made)
    assert step(made, new=[("a", 0)], computes=40).keeps == [Keep("a", [], TABLE[:2], {})]
    assert step(made, cached=[("a", 40)], computes=7).keeps == []
    assert step(made, cached=[("a", 47)], computes=53).keeps == [Keep("a", [], TABLE[:6], {})]
    asked.all_token_ids += range(12)
    assert step(made, cached=[("a", 111)], computes=1).keeps == []
    asked.all_token_ids.append(12)
    assert step(made, cached=[("a", 112)], computes=1).keeps == [Keep("a", [*range(13)], TABLE[:7], {})]


def test_tokens_that_a_draft_proposed_are_not_kept_before_they_are_accepted() -> None:
    made, asked = finding(), request()
    made.arrived(asked)
    step(made, new=[("a", 0)], computes=100)
    asked.all_token_ids += [1]
    assert step(made, cached=[("a", 100)], computes=16).keeps == []


def test_what_looks_ahead_is_kept_once_the_next_token_is_known() -> None:
    made, asked = finding(ahead=True), request(tokens=PROMPT[:32])
    made.arrived(asked)
    assert step(made, new=[("a", 0)], computes=32).keeps == [Keep("a", PROMPT[:32], TABLE[:1], {})]
    asked.all_token_ids += [1]
    assert step(made, cached=[("a", 32)], computes=1).keeps == [Keep("a", [1], TABLE[:2], {})]


def test_what_was_found_is_not_kept_again() -> None:
    made, asked = finding(), request()
    made.arrived(asked)
    step(made)
    assert step(made, new=[("a", 48)], computes=10).keeps == []
    assert step(made, cached=[("a", 58)], computes=42).keeps == [Keep("a", [], TABLE[:6], {})]


def test_selective_keeps_what_a_second_request_has_found() -> None:
    made, asked = finding(write_policy="write_through_selective"), request()
    made.arrived(asked)
    step(made)
    assert step(made, new=[("a", 48)], computes=52).keeps == [Keep("a", [], TABLE[:3], {})]
    assert step(made, cached=[("a", 100)], computes=1).keeps == []


def test_a_request_that_ends_leaves_nothing() -> None:
    made, asked = finding(), request()
    made.arrived(asked)
    made.finished(asked)
    made.answered({"a": (3, 1)})  # late
    assert step(made).over == ["a"]
    assert made.matched(asked, 0) == (0, False)


def test_workers_have_what_each_of_them_has() -> None:
    assert merged({"a": (3, 1), "b": (2, 2)}, {"a": (4, 2)}) == {"a": (3, 3), "b": (2, 2)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "storage"),
        ({"storage": 7}, "storage"),
        ({"storage": "/kv", "polisy": 1}, "polisy"),
        ({"storage": "/kv", "write_policy": "write_back"}, "vLLM does not say which block"),
        ({"storage": "/kv", "write_policy": "sometimes"}, "write_policy"),
        ({"storage": "/kv", "prefetch_policy": "never"}, "prefetch_policy"),
        ({"storage": "/kv", "host_bytes": -1}, "host_bytes"),
        ({"storage": "/kv", "host_bytes": True}, "host_bytes"),
        ({"storage": "/kv", "prefetch_timeout_base": "1"}, "prefetch_timeout_base"),
        ({"storage": "/kv", "durable": 1}, "durable"),
        ({"storage": "/kv", "weights": 1}, "weights"),
        ({"storage": "/kv", "seal": True}, "seal"),
        ([], "settings of"),
    ],
)
def test_a_setting_that_is_wrong_is_named(given: Any, says: str) -> None:
    with pytest.raises(LocalError, match=says):
        TierSettings.of(given)


def test_patience_is_hicaches() -> None:
    assert TierSettings.of({"storage": "/kv"}).patience(2048) == 1.5
    assert TierSettings.of({"storage": "/kv", "prefetch_policy": "wait_complete"}).patience(2048) == float("inf")


FACTS = {"weights.target": "test 1", "rope.target": "none"}


def worker(storage: Path, facts: dict[str, str] = FACTS) -> tuple[Keeping, Pool]:
    geometry = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=PAGE)], facts=facts)
    pool = Pool.allocate(geometry, 16)
    return Keeping(HostTiers(pool, names_of(geometry), page=PAGE, host_bytes=1 << 16, storage=storage), SETTINGS), pool


def answer(keeping: Keeping) -> int:
    """Pages of request "a", once storage has given them."""
    while not (found := keeping.found()):
        continue
    return found["a"][0]


def test_workers_keep_pages_and_find_them_again(tmp_path: Path) -> None:
    one, pool = worker(tmp_path)
    pool.array("kv", 1, "v")[[7, 3]] = [[[[1]]], [[[2]]]]
    one.keep(TierOrders(keeps=[Keep("b", PROMPT[:40], [7, 3], {})], over=["b"]))
    one.close()
    two, other = worker(tmp_path)
    two.take(TierOrders(looks=[Look("a", PROMPT, {})]))
    assert answer(two) == 2
    two.take(TierOrders(places=[Place("a", 1, [12])]))
    assert two.results() == ({"a"}, set())
    assert (other.array("kv", 1, "v")[12] == 2).all()
    two.keep(TierOrders(over=["a"]))
    assert two.tiers.host.slots.idle == 2  # nothing is pinned


@pytest.mark.parametrize("names", [{"salt": "tenant"}, {"adapter": "digest"}])
def test_another_tenant_or_adapter_finds_nothing(names: dict[str, str], tmp_path: Path) -> None:
    one, _ = worker(tmp_path)
    one.keep(TierOrders(keeps=[Keep("b", PROMPT[:40], [7, 3], names)]))
    one.tiers.drain()
    for wanted, others in ((0, {}), (2, names)):
        one.take(TierOrders(looks=[Look("a", PROMPT, others)]))
        assert answer(one) == wanted
        one.keep(TierOrders(over=["a"]))


def test_an_adapter_and_a_tenant_are_names_of_the_pages(tmp_path: Path) -> None:
    made, folder = finding(), adapter(tmp_path)
    lora = SimpleNamespace(lora_name="law", lora_path=str(folder))
    asked = request(lora_request=lora, cache_salt="tenant")
    made.arrived(asked)
    names = {"adapter": adapter_digest(folder).hex(), "salt": "tenant"}
    assert step(made).looks == [Look("a", PROMPT, names)]
    assert step(made, new=[("a", 0)], computes=40).keeps == [Keep("a", [], TABLE[:2], names)]


def test_an_adapter_that_cannot_be_read_is_not_looked_for(tmp_path: Path) -> None:
    made, asked = finding(), request(lora_request=SimpleNamespace(lora_name="law", lora_path=str(tmp_path)))
    made.arrived(asked)
    assert made.matched(asked, 0) == (0, False)
    assert step(made) == TierOrders()


def test_a_request_that_is_aborted_while_it_is_read_pins_nothing(tmp_path: Path) -> None:
    one, _ = worker(tmp_path)
    one.keep(TierOrders(keeps=[Keep("b", PROMPT[:40], [7, 3], {})]))
    one.take(TierOrders(looks=[Look("a", PROMPT, {})]))
    answer(one)
    one.keep(TierOrders(over=["a", "b"]))
    one.tiers.drain()
    assert one.tiers.host.slots.idle == 2


def test_what_is_not_there_any_more_fails(tmp_path: Path) -> None:
    one, _ = worker(tmp_path)
    one.take(TierOrders(places=[Place("a", 0, [12])]))
    assert one.results() == ({"a"}, {"a"})


def test_target_and_draft_are_named_by_facts_and_element_types() -> None:
    caches = [
        Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=PAGE, dtype=DType.BF16),
        Cache.gqa("draft", 1, kv_heads=1, head_dim=4, page=PAGE, model=1, dtype=DType.F8E4M3),
    ]
    facts = FACTS | {"weights.draft": "test 2"}
    named = names_of(lay_out(caches, facts=facts))
    assert named == facts | {"dtype.target": "bfloat16", "dtype.draft": "f8e4m3"}


def test_two_connectors_of_an_engine_give_one_context_for_its_caches() -> None:
    first = only_context(torch.int8)
    assert first is not None
    assert only_context(torch.int8) is None
    del first
    assert only_context(torch.int8) is not None


def test_pages_without_a_name_of_the_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"weights\.target"):
        worker(tmp_path, {"rope.target": "none"})
