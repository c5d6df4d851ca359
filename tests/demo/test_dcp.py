"""Prefill and decode that divide tokens in ways of their own: context parallel, DCP, and replicas of both."""

from pathlib import Path

import pytest

from tests.demo.test_demo import demo, nothing_is_left_behind, prompts, report
from tests.processes import imported

__all__ = ["nothing_is_left_behind", "prompts"]
imported("kvproto_reference.demo.__main__")

RUNS = {
    "MLA, TP 2 to DCP 2": "--decode-tp 2 --dcp 2",
    "GQA, CP 3 in fives to TP 4 with DCP 2 in threes": (
        "--prefill-tp 1 --prefill-cp 3 --prefill-interleave 5 --target gqa --draft gqa"
        " --decode-tp 4 --dcp 2 --interleave 3 --exchange ag_rs"
    ),
    "MLA, TP 2 x CP 2 to DCP 4 with the draft dealt": (
        "--prefill-cp 2 --decode-tp 4 --dcp 4 --interleave 16 --draft mla --draft-sharded"
    ),
    "GQA, queries on every rank": "--prefill-tp 1 --decode-tp 2 --dcp 2 --target gqa --draft mla --replicate-q",
    "JAX to torch with DCP 2": "--prefill-framework jax --decode-tp 2 --dcp 2 --target gqa --draft mla",
    "torch to JAX with DCP 2": "--decode-framework jax --prefill-tp 1 --decode-tp 2 --dcp 2",
    "JAX to JAX, TP 2 to TP 4 with DCP 2": (
        "--prefill-framework jax --decode-framework jax --decode-tp 4 --dcp 2 --interleave 3"
    ),
    "two replicas of each, ranks without a route": (
        "--prefill-tp 2 --prefill-dp 2 --decode-dp 2 --target mla --draft mla"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_one_engine(name: str, prompts: Path) -> None:
    result = demo(*RUNS[name].split(), "--prompt-file", prompts, "--json", "--max-new", "20")
    assert result.status == 0, result.said
    told = report(result)
    assert told["verdicts"] == {"requests": True, "checksums": True, "tokens": True, "acceptance": True}
    assert max(request["acceptance"] for request in told["requests"]) > 1.5
    stored = told["plan"]["stored"]
    ratios = {group: whole / dealt for group, (dealt, whole) in stored.items()}
    dcp = {"MLA, TP 2 to DCP 2": (2, 1), "GQA, queries on every rank": (1, 1)}.get(name)
    if dcp:
        assert (ratios["target"], ratios["draft"]) == dcp


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--decode-tp 2 --dcp 3", "DCP groups of 3 do not divide 2 TP ranks"),
        ("--decode-tp 3 --dcp 3", "DCP needs as many heads on every rank: 3 ranks do not divide 4 heads"),
        ("--dcp 0", "--dcp must be at least 1"),
        ("--prefill-dp 0", "must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(args: str, says: str, prompts: Path) -> None:
    result = demo(*args.split(), "--prompt-file", prompts)
    assert result.status == 1
    assert says in result.said
    assert "Traceback" not in result.said
