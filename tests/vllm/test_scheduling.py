"""The scheduler's side of the connector: what workers are told in each step of an engine, and what goes back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvproto import adapter_digest, new_ticket, read_ticket, write_ticket
from kvproto_engines.orders import Orders
from kvproto_reference.adapters import Adapter
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_vllm.params import prompt_of
from kvproto_vllm.scheduling import Scheduling
from kvproto_vllm.settings import Settings
from tests.vllm.adapters import adapter

TOKENS = list(range(100, 200))
TABLES = {"a": ([7, 3, 5, 1],)}
PREFILL = {"do_remote_decode": True}


def scheduling(states: bool = False, **more: Any) -> Scheduling:
    return Scheduling(Settings(name="me", deadline=30), 2, True, True, states=states, **more)


def request(params: Any, name: str = "a", tokens: Any = TOKENS) -> Any:
    """What vLLM calls a request, as far as a connector looks."""
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=tokens, num_prompt_tokens=len(tokens or []),
        lora_request=None, mm_features=[], max_tokens=1, _all_token_ids=list(tokens or []),
    )  # fmt: skip


def arrived(params: Any, tokens: Any = TOKENS, states: bool = False) -> tuple[Scheduling, Any]:
    """A request that has come to a scheduler."""
    made, asked = scheduling(states), request(params, tokens=tokens)
    made.arrived(asked)
    return made, asked


def step(made: Scheduling, *, new: Any = (), cached: Any = (), computes: int = 0, preempted: Any = None) -> Orders:
    """A step of vLLM's scheduler: (request, tokens computed before) of new and of known requests."""
    known = SimpleNamespace(req_ids=[name for name, _ in cached], num_computed_tokens=[n for _, n in cached])
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new],
        scheduled_cached_reqs=known, num_scheduled_tokens={name: computes for name, _ in (*new, *cached)},
        preempted_req_ids=preempted,
    )  # fmt: skip
    return made.orders(output, TABLES.__getitem__)


def decode(**more: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "ticket": write_ticket(new_ticket("them"))} | more


def blocks(*tables: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: tables)


def test_an_ordinary_request_is_none_of_its_business() -> None:
    made, plain = arrived(None)
    assert made.matched(plain, 0) == (0, False)
    assert step(made, new=[("a", 0)], computes=100) == Orders()
    assert made.finished(plain) == (False, None)


def test_a_request_is_known_before_it_is_computed_and_its_chunks_are_told() -> None:
    made, asked = arrived(PREFILL)
    first = step(made)
    assert list(first.requests) == ["a"]
    chunks = [*step(made, new=[("a", 0)], computes=64).computed, *step(made, cached=[("a", 64)], computes=36).computed]
    assert [(each.tokens, each.last, each.tables) for each in chunks] == [
        (64, False, TABLES["a"]),
        (100, True, TABLES["a"]),
    ]
    assert step(made, cached=[("a", 100)], computes=1).computed == []  # decodes on
    held, params = made.finished(asked)
    assert held
    assert params is not None
    ticket, _ = first.requests["a"]
    back = read_ticket(params["ticket"])
    assert back == attrs.evolve(
        ticket, deadline=5000
    )  # it is known already: who brings it is answered, or nobody lives
    assert (ticket.engine, ticket.replica, params["do_remote_prefill"]) == ("me", 2, True)
    assert step(made).held == ["a"]


def test_with_states_the_last_token_is_left_to_the_other_engine() -> None:
    made, asked = arrived(PREFILL, states=True)
    assert asked.prompt_token_ids == asked._all_token_ids == TOKENS[:-1]
    assert asked.num_prompt_tokens == 99
    first = step(made, new=[("a", 0)], computes=99)
    assert len(first.requests["a"][1]) == 100  # whoever fetches it names the whole prompt
    assert [(each.tokens, each.last) for each in first.computed] == [(99, True)]
    again = step(made, preempted={"a"})
    assert len(again.requests["a"][1]) == 100
    assert [(each.tokens, each.last) for each in step(made, cached=[("a", 0)], computes=99).computed] == [(99, True)]


def test_with_states_a_prompt_of_one_token_stays_whole() -> None:
    made, asked = arrived(PREFILL, tokens=[7], states=True)
    assert asked.prompt_token_ids == [7]
    assert step(made, new=[("a", 0)], computes=1).computed[0].last


def test_with_states_a_request_that_is_decoded_on_is_not_handed_over() -> None:
    made, asked = scheduling(states=True), request(PREFILL)
    asked.max_tokens = 2
    made.arrived(asked)
    assert asked.prompt_token_ids == TOKENS
    assert step(made, new=[("a", 0)], computes=100) == Orders()


def test_a_ticket_made_beforehand_is_used() -> None:
    made, ticket = scheduling(), new_ticket("me", 2, 30)
    made.arrived(request(PREFILL | {"ticket": write_ticket(ticket)}))
    assert step(made).requests["a"][0] == ticket


def test_after_preemption_a_ticket_that_nobody_has_is_replaced() -> None:
    made, asked = arrived(PREFILL)
    before = step(made, new=[("a", 0)], computes=64).requests["a"][0]
    orders = step(made, preempted={"a"})
    after = orders.requests["a"][0]
    assert list(orders.preempted.values()) == ["a"]
    assert after != before
    assert step(made, cached=[("a", 0)], computes=100).computed[0].last
    params = made.finished(asked)[1]
    assert params is not None
    assert read_ticket(params["ticket"]).key == after.key


def test_after_preemption_a_ticket_that_somebody_has_is_lost() -> None:
    made, asked = arrived(PREFILL | {"ticket": write_ticket(new_ticket("me", 2))})
    step(made, new=[("a", 0)], computes=64)
    assert step(made, preempted={"a"}).requests == {}
    assert step(made, cached=[("a", 0)], computes=100).computed == []
    assert made.finished(asked) == (True, None)
    assert step(made).failed == {"a": "preempted"}


def test_preemption_before_anything_was_computed_costs_nothing() -> None:
    made = scheduling()
    made.arrived(request(PREFILL))
    assert step(made, preempted={"a"}).preempted == {}


class _Blocks:
    """A block pool of vLLM, as far as a connector counts references."""

    def __init__(self, count: int = 10) -> None:
        self.blocks = [SimpleNamespace(block_id=n, ref_cnt=0, is_null=not n) for n in range(count)]

    def touch(self, blocks: Any) -> None:
        for each in blocks:
            assert not each.is_null
            each.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for each in blocks:
            each.ref_cnt -= 1

    @property
    def used(self) -> list[int]:
        return [each.block_id for each in self.blocks if each.ref_cnt]


def holding(params: Any, early: bool = True, workers: int = 2) -> tuple[Scheduling, Any, _Blocks]:
    """A scheduler of an engine of some workers, its pool, and a request that it has computed all of."""
    made, pool, asked = scheduling(early=early, workers=workers), _Blocks(), request(params)
    made.holds.bind(pool)
    made.arrived(asked)
    pool.touch([pool.blocks[n] for n in TABLES["a"][0]])  # those of vLLM's own request
    return made, asked, pool


OTHERS = PREFILL | {"ticket": write_ticket(new_ticket("me", 2))}


def preempt(pool: _Blocks) -> None:
    """As vLLM does in a step, before the connector hears of it."""
    pool.free_blocks([pool.blocks[n] for n in TABLES["a"][0]])


def test_blocks_of_a_preempted_request_are_reused_when_no_worker_has_a_reader() -> None:
    made, _, pool = holding(OTHERS)
    step(made, new=[("a", 0)], computes=64)
    assert not made.holds.pending
    preempt(pool)
    assert made.holds.pending  # vLLM waits for a step, and preempts no other request for blocks that are on their way
    (number,) = step(made, preempted={"a"}).preempted
    assert pool.used == [1, 3, 5, 7]
    made.holds.told({number: 1}, {})
    assert pool.used == [1, 3, 5, 7]
    made.holds.told({number: 1}, {})
    assert pool.used == []
    assert not made.holds.pending


def test_blocks_that_stay_in_use_keep_no_other_request_waiting() -> None:
    made, _, pool = holding(OTHERS)
    step(made, new=[("a", 0)], computes=64)
    preempt(pool)
    (number,) = step(made, preempted={"a"}).preempted
    made.holds.told({}, {number: 1})
    assert not made.holds.pending
    assert pool.used == [1, 3, 5, 7]
    made.holds.told({number: 2}, {})
    assert pool.used == []


def test_blocks_of_a_request_that_is_over_are_held_until_it_is_sent() -> None:
    """Also those that a sliding window has left since."""
    made, asked, pool = holding(PREFILL)
    step(made, new=[("a", 0)], computes=100)
    made.finished(asked)
    preempt(pool)
    assert pool.used == [1, 3, 5, 7]
    made.holds.sent({"a", "another"})
    assert pool.used == []


def test_what_nobody_can_read_yet_is_not_held() -> None:
    """Its ticket is of this engine's making, and has gone to nobody."""
    made, _, pool = holding(PREFILL)
    step(made, new=[("a", 0)], computes=64)
    preempt(pool)
    assert pool.used == []
    assert step(made, preempted={"a"}).preempted


def test_a_release_that_does_not_wait_for_blocks_hands_over_at_the_end() -> None:
    """It would preempt all requests in a step for blocks that are held."""
    made, _, pool = holding(OTHERS, early=False)
    assert step(made, new=[("a", 0)], computes=64).computed == []
    preempt(pool)
    assert pool.used == []
    pool.touch([pool.blocks[n] for n in TABLES["a"][0]])
    assert [each.last for each in step(made, cached=[("a", 64)], computes=36).computed] == [True]


def test_a_prefill_that_is_aborted_fails_for_whoever_waits() -> None:
    made, asked = arrived(PREFILL)
    step(made, new=[("a", 0)], computes=64)
    assert made.finished(asked) == (True, None)
    orders = step(made)
    assert list(orders.failed) == orders.held == ["a"]


def test_all_but_the_last_token_is_fetched_once() -> None:
    made, asked = arrived(decode())
    assert made.matched(asked, 32) == made.matched(asked, 32) == (67, True)
    made.allocated(asked, blocks([9, 8, 2, 4]), 67)
    (load,) = step(made).loads
    assert (load.request, load.cached, load.tokens, load.tables) == ("a", 32, 99, ([9, 8, 2, 4],))
    made.allocated(asked, blocks([9, 8, 2, 4]), 0)  # vLLM calls again when it is there
    assert made.matched(asked, 0) == (0, False)  # it failed, or was preempted: compute it here
    assert step(made) == Orders()


@pytest.mark.parametrize("cached", [99, 100])
def test_what_is_there_is_not_fetched_and_the_source_told(cached: int) -> None:
    made, asked = arrived(decode())
    assert made.matched(asked, cached) == (0, False)
    made.allocated(asked, blocks([1, 2, 3, 4]), 0)
    orders = step(made)
    assert orders.loads == []
    (spared,) = orders.spared
    assert spared.cached == spared.tokens == 100


def test_a_decode_that_is_aborted_while_it_waits_frees_the_source() -> None:
    made, asked = arrived(decode())
    assert made.finished(asked) == (False, None)
    assert [load.request for load in step(made).spared] == ["a"]


def test_a_request_that_vllm_makes_up_to_end_another_tells_the_source_nothing() -> None:
    """Its prompt is [0], whatever the prompt of the request was that was refused, or whose load failed."""
    made, placeholder = arrived(decode(), tokens=[0])
    assert made.finished(placeholder) == (False, None)
    assert step(made) == Orders()


def test_a_fetch_under_way_is_aborted() -> None:
    made, asked = arrived(decode())
    made.allocated(asked, blocks([1, 2, 3, 4]), 99)
    made.finished(asked)
    assert step(made).aborted == ["a"]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"do_remote_prefill": True}, "ticket"),
        (decode(ticket="nonsense"), "JSON"),
        (decode(ticket={"key": "00"}), "key"),
        (decode(ticket=7), "ticket"),
    ],
)
def test_a_fetch_by_what_is_no_ticket_fails_that_request(params: Any, says: str) -> None:
    made, asked = arrived(params)
    assert made.matched(asked, 0) == (99, True)
    made.allocated(asked, blocks([1, 2, 3, 4]), 99)
    orders = step(made)
    assert orders.loads == []
    assert says in orders.refused["a"][0]
    assert orders.refused["a"][1] == ([1, 2, 3, 4],)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (decode(do_remote_decode=True), "do_remote_prefill (bool)"),
        (PREFILL | {"ticket": 7}, "ticket"),
        (PREFILL | {"ticket": {"engine": 3}}, "MISSING_FIELD at key"),
        (PREFILL | {"ticket": write_ticket(new_ticket("nobody", 2))}, "expected me replica 2, got nobody replica 2"),
        (PREFILL | {"ticket": write_ticket(new_ticket("me"))}, "expected me replica 2, got me replica 0"),
    ],
)
def test_a_prefill_that_cannot_be_handed_over_is_computed_and_returns_no_ticket(
    params: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, asked = arrived(params)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith("request a is not handed over: ")
    assert says in record.getMessage()
    assert step(made, new=[("a", 0)], computes=100) == Orders()
    assert made.finished(asked) == (False, None)


def test_a_prompt_of_embeddings_is_not_handed_over() -> None:
    made, _ = arrived(PREFILL, tokens=None)
    assert step(made) == Orders()


def test_parameters_of_others_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    made, asked = arrived({"remote_engine_id": "x", "do_remote_prefill": False, "ticket": None})
    assert made.matched(asked, 0) == (0, False)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"do_remote_decode": "yes"}, "do_remote_decode (str)"),
        ({"do_remote_prefill": 1}, "do_remote_prefill (int)"),
        ({"ticket": write_ticket(new_ticket("me", 2))}, "ticket (dict)"),
        ({"ticket": "{}", "do_remote_prefill": False}, "ticket (str)"),
    ],
)
def test_parameters_without_effect_are_named(params: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    made, asked = arrived(params)
    assert made.matched(asked, 0) == (0, False)
    assert step(made, new=[("a", 0)], computes=100) == Orders()
    assert made.finished(asked) == (False, None)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().startswith("request a is computed here: ")) == ("WARNING", True)
    assert record.getMessage().endswith(f"got {says} (see docs/vllm-reference.md)")


@pytest.mark.parametrize(("params", "roles"), [(PREFILL, (False, True)), (decode(), (True, False))])
def test_a_request_for_the_other_role_is_refused(params: Any, roles: tuple[bool, bool]) -> None:
    made, asked = Scheduling(Settings(name="me"), 0, *roles), request(params)
    made.arrived(asked)
    made.allocated(asked, blocks([1]), 99)
    orders = step(made)
    assert orders.requests == {}
    assert orders.loads == []
    assert bool(orders.refused) == roles[0]


def test_images_adapters_and_tenants_are_part_of_the_prompt(tmp_path: Path) -> None:
    """As they are of vLLM's block hashes: an adapter by its name and, as the same name may mean others, its weights."""
    made, digests = scheduling(), set()
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    ways = [
        (None, [], None), (("law", one), [], None), (("tax", one), [], None), (("law", two), [], None),
        (("law", "a/hub"), [], None), (None, [("image", "x")], None), (None, [("image", "y")], None),
        (None, [], "tenant"), (None, [], "other"), (None, [], "\ud800"), (("law", "a\ud800"), [], None), (("law", one), [("image", "x")], "tenant"),
    ]  # fmt: skip
    for n, (lora, seen, salt) in enumerate(ways):
        asked = request(PREFILL, str(n))
        asked.lora_request = SimpleNamespace(lora_name=lora[0], lora_path=str(lora[1])) if lora else None
        asked.mm_features = [SimpleNamespace(modality=kind, identifier=name) for kind, name in seen]
        asked.cache_salt = salt
        made.arrived(asked)
        digests.add(step(made).requests[str(n)][1].digest)
    assert len(digests) == len(ways)


def test_the_reference_engine_has_the_same_prompt(tmp_path: Path) -> None:
    folder, asked = adapter(tmp_path, 1), request(PREFILL, "a")
    asked.lora_request, asked.cache_salt = SimpleNamespace(lora_name="law", lora_path=str(folder)), "tenant"
    own = Adapter("law", folder, adapter_digest(folder))
    theirs = TokenSequence(prompt=asked.prompt_token_ids, max_new=1, adapter=own, cache_salt="tenant").asked
    assert prompt_of(asked).digest == theirs.digest


def test_ranks_hear_who_handed_a_request_over() -> None:
    made = scheduling()
    made.taken({"a": (0, 3)})
    assert step(made).taken == {"a": (0, 3)}
    assert step(made).taken == {}


@pytest.mark.parametrize(("stated", "kept"), [(5, 5), (1 << 22, 30)])
def test_what_a_client_says_of_deadlines_does_not_outlast_the_setting(stated: int, kept: int) -> None:
    """The ticket is whoever asks; pages are this engine's."""
    made, _ = arrived(PREFILL | {"ticket": write_ticket(new_ticket("me", 2, stated))})
    ticket, _ = step(made).requests["a"]
    assert ticket.deadline == 1000 * kept
    made, asked = arrived({"do_remote_prefill": True, "ticket": write_ticket(new_ticket("other", 0, stated))})
    made.allocated(asked, blocks([1, 2]), 4)
    assert step(made).loads[0].ticket.deadline == 1000 * kept
