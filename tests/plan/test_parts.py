"""Names of parts: the registry, the constructors that use it, and what is said of aliases."""

import random
from itertools import combinations
from pathlib import Path

import attrs
import pytest

from kvproto.errors import LocalError, PlanError
from kvproto.planning.geometry import Geometry, mla, owns, validate
from kvproto.planning.layout import Cache, lay_out
from kvproto.planning.parts import ALIASES, OPTIONAL, PARTS, SCALES, SHARE_OF
from kvproto.planning.plan import plan
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ErrorCode, ItemKind
from kvproto.wire.messages import Part, Rank
from kvproto_conformance.codec import Refusal
from kvproto_conformance.planner import plan as other_plan
from tests.errors import raises
from tests.plan import oracle
from tools.specgen.registry import load

BUILT = [
    Cache.gqa("a", 2, kv_heads=2, head_dim=8, page=4),
    Cache.gqa("b", 2, kv_heads=2, head_dim=64, page=4, scale_block=32),
    Cache.mla("c", 2, latent=16, rope=8, page=4),
    Cache.cross("l", 2, kv_heads=2, head_dim=8, page=4),
    Cache.encoder("m", dim=8, page=4),
    Cache.mla("p", 2, latent=16, rope=8, page=4, split=True),
    Cache.mla("q", 2, latent=128, rope=64, page=4, scale_block=64),
    Cache.indexer("d", 2, head_dim=128, page=4),
    Cache.page_scales("e", 2, kv_heads=2, page=4),
    Cache.page_scales("r", 2, of="latent", page=4),
    Cache.compressed("f", 2, dim=8, tokens_per_row=4, page_rows=2),
    Cache.window("g", 2, kv_heads=2, head_dim=8, ring_rows=4),
    Cache.ring("s", 2, parts={"window_latent": (DType.BF16, 1, 16)}, ring_rows=4),
    Cache.ring("t", 2, parts={"compress_state": (DType.F32, 1, 16)}, ring_rows=4),
    Cache.ring("u", 2, parts={"index_compress_state": (DType.F32, 1, 16)}, ring_rows=4),
    Cache.ring("v", 2, parts={"pending_index": (DType.BF16, 1, 16)}, ring_rows=4),
    Cache.ring("v2", 2, parts=dict.fromkeys(("pending_index", "pending_score"), (DType.BF16, 1, 16)), ring_rows=4),
    Cache.paged("conv rows", 2, parts={"conv_rows": (DType.BF16, 4, 16)}, page=4),
    Cache.ring("w", 1, parts={"pending_position": (DType.I64, 1, 24)}, ring_rows=4),
    Cache.state("x", 2, parts={"ple_conv": (DType.BF16, 8, 2)}, rows=3),
    Cache.state("y", 1, parts={"ngram": (DType.I64, 1, 8)}, rows=2),
    Cache.paged("z", 2, parts={"hidden_rows": (DType.BF16, 1, 16)}, page=4),
    *Cache.mamba1("h", 2, channels=8, state=4, kernel=4),
    *Cache.mamba2("i", 2, heads=4, head_dim=8, groups=1, state=4, kernel=4),
    *Cache.gdn("j", 2, key_heads=2, key_dim=8, value_heads=2, value_dim=8, kernel=4),
    Cache.handoff("k", {"token": (DType.I32, 4), "hidden": (DType.BF16, 64)}),
]
GROUPS = load()["group"]


@pytest.mark.parametrize("cache", BUILT, ids=lambda cache: cache.group.name)
def test_constructors_make_groups_of_the_registry(cache: Cache) -> None:
    names = {p.name for p in cache.group.parts}
    kind = ItemKind(cache.group.kind).name
    assert any(
        set(row["has"]) <= names <= {*row["has"], *row["may"]} and kind in row["kinds"] for row in GROUPS.values()
    )


def test_every_constructor_is_among_them() -> None:
    source = Path(__file__).read_text()
    makers = {name for name in vars(Cache) if isinstance(vars(Cache)[name], classmethod) and not name.startswith("_")}
    assert {name for name in makers if f"Cache.{name}(" not in source} == set()


def test_each_group_of_the_registry_has_a_constructor_that_makes_it() -> None:
    made = {frozenset(p.name for p in c.group.parts) for c in BUILT}
    assert all(any({*row["has"]} <= names for names in made) for row in GROUPS.values())


def test_no_alias_is_a_name_and_shares_are_of_names() -> None:
    assert not ALIASES.keys() & set(PARTS)
    assert set(ALIASES.values()) <= set(PARTS)
    assert SHARE_OF.keys() | set(SHARE_OF.values()) <= set(PARTS)


def named(*names: str) -> Geometry:
    """One rank and layer, one group with a part of each name."""
    made = lay_out(
        [Cache.paged("target", 1, parts={f"acme.{n}": (DType.BF16, 1, 16) for n in range(len(names))}, page=4)]
    )
    parts = tuple(attrs.evolve(p, name=name) for p, name in zip(made.groups[0].parts, names, strict=True))
    return attrs.evolve(made, groups=(attrs.evolve(made.groups[0], parts=parts),))


def refusal(source: Geometry, sink: Geometry) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(source, sink)
    with raises(Refusal, code=caught.value.code.name, path=caught.value.path):
        other_plan(to_json(source), to_json(sink))
    return caught.value


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_not_its_name_and_the_refusal_says_which_to_use(alias: str, name: str) -> None:
    """KVP-PART-ALIAS, both ways round, and for two aliases of one name."""
    for source, sink in ((alias, name), (name, alias)):
        error = refusal(named(source), named(sink))
        assert (error.code, error.path) == (ErrorCode.PART_MISSING, f"groups[target].parts[{sink}]")
        assert (error.mine, error.yours) == (source, sink)
        assert f"both are {name}" in error.advice


@pytest.mark.parametrize(("share", "whole"), SHARE_OF.items())
def test_a_share_is_told_from_the_whole(share: str, whole: str) -> None:
    error = refusal(named(share), named(whole))
    assert f"{share} is the registered name of a share of {whole}" in error.advice
    assert refusal(named(whole), named(share)).advice == error.advice


@pytest.mark.parametrize("part", [part for part in PARTS if part not in (*OPTIONAL, "odd")])
def test_one_part_of_a_layer_is_not_taken_without_another(part: str) -> None:
    """KVP-PLAN-LEFT: of any name, listed or not; a sink that takes nothing of a layer is owed nothing."""
    error = refusal(named("odd", part), named("odd"))
    assert (error.code, error.path) == (ErrorCode.PART_MISSING, "groups[target].parts[odd]")
    assert (error.mine, error.yours) == (f"{part} beside odd in layer 0", f"odd without {part}")
    assert f"without=['{part}']" in error.advice
    meant = attrs.evolve(named("odd"), without=(part,))
    assert plan(named("odd", part), meant).routes
    assert plan(named("odd", part), named("odd", part)).routes


@pytest.mark.parametrize(("name", "of"), [*SCALES.items(), *SHARE_OF.items(), ("key_scale", "self_attn.k")])
def test_no_advice_leaves_out_what_a_part_needs(name: str, of: str) -> None:
    """KVP-PLAN-LEFT: codes without their scales are other numbers, and so is a share of a part without the other."""
    error = refusal(named(of, "odd", name), named(of))
    assert "without=" not in error.advice
    assert f"take {name} too" in error.advice


@pytest.mark.parametrize("name", ["k_scale", "key_scale"])
def test_a_sink_does_not_say_that_it_needs_no_scales(name: str) -> None:
    cache = Cache.gqa("kv", 1, kv_heads=2, head_dim=8, page=4)
    with raises(LocalError, path="without", yours=repr(name)):
        lay_out([cache], without=[name])
    for other in ("index_scale", "acme.x"):
        assert lay_out([cache], without=[other]).without == (other,)


def test_what_a_sink_does_not_need_is_a_part() -> None:
    with raises(LocalError, path="without", yours="'kk'"):
        lay_out([Cache.gqa("kv", 1, kv_heads=2, head_dim=8, page=4)], without=["kk"])


@pytest.mark.parametrize("part", OPTIONAL)
def test_optional_parts_are_taken_or_left(part: str) -> None:
    """KVP-PLAN-LEFT, by the name and by its aliases, and neither way round."""
    for name in (part, *(alias for alias, of in ALIASES.items() if of == part)):
        assert plan(named("odd", name), named("odd")).routes
        assert plan(named("odd", name), named(name)).routes


@pytest.mark.parametrize("seed", range(80))
def test_what_is_left_is_found_part_by_part(seed: int) -> None:
    """KVP-PLAN-LEFT: groups, layers and models apart, under any names, against a search of every layer."""
    rng = random.Random(seed)
    words = ["k", "key_scale", "v", "latent", "odd", "acme.x", "ssm", "hidden_rows", "image_embeds"]
    names = rng.sample(words, rng.randint(2, 6))
    held = [(model, name, layer) for model in (0, 1) for name in names for layer in range(3) if rng.random() < 0.8]
    taken = [at for at in held if rng.random() < rng.choice([0.8, 1.0])]
    source, sink = apart(rng, held), apart(rng, taken or held)
    sink = attrs.evolve(sink, without=tuple(rng.sample(names, rng.randint(0, len(names) - 1))) or None)
    wanted = oracle.left(source, sink, {"hidden_rows", "image_embeds"})
    if wanted is None:
        assert plan(source, sink).routes
        return
    error = refusal(source, sink)
    assert (error.code, error.path) == (ErrorCode.PART_MISSING, f"groups[{wanted[0]}].parts[{wanted[1]}]")


def apart(rng: random.Random, held: list[tuple[int, str, int]]) -> Geometry:
    """Two ranks; of each model and name one group or two, in any order."""
    layers: dict[tuple[int, str, int], list[int]] = {}
    for model, name, layer in held:
        layers.setdefault((model, name, rng.randint(0, 1)), []).append(layer)
    groups, shares = [], []
    for id_, (model, name, half) in enumerate(rng.sample(sorted(layers), len(layers))):
        group = attrs.evolve(
            mla(id_, f"g{id_}", model, 8, 4), parts=(Part(name=name, dtype=DType.U8, lanes=1, lane_bytes=8),)
        )
        groups.append(group)
        shares.append(owns(group, layers[model, name, half]))
    ranks = tuple(Rank(rank=r, owns=tuple(s for s in shares if r or rng.random() < 0.5)) for r in range(2))
    return Geometry(replica=0, facts=(), groups=tuple(groups), ranks=ranks)


def test_a_name_that_nobody_knows_is_said_to_be_absent() -> None:
    error = refusal(named("k"), named("acme.k_residual"))
    assert (error.mine, error.yours) == ("k of model 0", "acme.k_residual of model 0")


def test_names_of_ones_own_pair_with_themselves() -> None:
    """KVP-PART-W-NAME: a SHOULD of writers, so readers take any name."""
    assert plan(named("acme.k_residual", "odd"), named("acme.k_residual", "odd")).routes


@pytest.mark.parametrize("name", PARTS)
def test_a_part_stated_twice_is_refused(name: str) -> None:
    """KVP-PART-TWICE, under its name and each alias, and under two aliases."""
    for pair in combinations((name, *(a for a, of in ALIASES.items() if of == name)), 2):
        odd = named(*pair)
        with raises(PlanError, code=ErrorCode.BAD_GEOMETRY, path="groups[0].parts") as caught:
            validate(odd)
        assert all(word in caught.value.yours for word in pair)
        with raises(Refusal, code="BAD_GEOMETRY", path="groups[0].parts"):
            other_plan(to_json(odd), to_json(odd))


def test_shares_stand_beside_each_other() -> None:

    validate(named("q_conv", "k_conv", "v_conv"))
