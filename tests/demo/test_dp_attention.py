"""DP attention: replicas of an engine share its experts, and any of decode fetches from any of prefill."""

from itertools import product
from pathlib import Path

import pytest

from kvproto_reference.demo.arguments import check
from kvproto_reference.demo.arguments import parse as parse_demo
from kvproto_reference.demo.options import parse
from kvproto_reference.errors import EngineError
from tests.demo.test_demo import demo, nothing_is_left_behind, report, right
from tests.processes import imported

__all__ = ["nothing_is_left_behind"]
imported("kvproto_reference.demo.__main__")

RUNS = {
    "DP 4 to DP 2, with a head": ("--prefill-tp 1 --prefill-dp 4 --decode-dp 2 --draft eagle", 4, 2),
    "TP 2 to DP 4": ("--prefill-tp 2 --decode-dp 4", 1, 4),
}
"""Options, and the numbers of replicas."""
DP = ["--target", "moe", "--dp-attention", "--max-new", "16"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Eight, so that every pair of replicas has one, of unequal length."""
    path = tmp_path / "prompts.txt"
    path.write_text(
        "\n\n".join("Alice was beginning to get very tired of sitting by her"[: 6 + 6 * n] for n in range(8))
    )
    return path


@pytest.mark.parametrize("name", RUNS)
def test_tokens_and_acceptance_are_those_of_one_engine(name: str, prompts: Path) -> None:
    options, prefills, decodes = RUNS[name]
    told = right(*DP, *options.split(), "--prompt-file", prompts)
    assert max(request["acceptance"] for request in told["requests"]) > 1.5
    asked = {tuple(request["engines"]) for request in told["requests"]}
    assert asked == {(f"prefill-{p}", f"decode-{d}") for p, d in product(range(prefills), range(decodes))}
    sent = {(f"prefill-{m['source_replica']}", f"decode-{m['sink_replica']}") for m in told["matrix"]}
    assert sent == asked
    assert {m["group"] for m in told["matrix"]} == {"target", "draft"}


def test_an_engine_that_is_told_to_end_finishes_what_all_its_replicas_have(prompts: Path) -> None:
    options = "--prefill-tp 1 --prefill-pp 2 --prefill-dp 2 --decode-tp 2 --dcp 2 --decode-dp 2 --drain"
    result = demo(*DP, *options.split(), "--prompt-file", prompts, "--json")
    assert result.status == 0, result.said
    assert report(result)["identical"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--target moe", "give their number by --prefill-dp or --decode-dp"),
        ("--decode-dp 2", "this target has none: choose --target moe"),
        ("--real --decode-dp 2", "this target has none"),
        ("--target moe --prefill-dp 2 --prefill-framework jax", "leave --prefill-framework jax out, or --prefill-dp"),
        ("--target moe --decode-dp 2 --attach /tmp/kv", "start yours with --dp"),
    ],
)
def test_options_of_the_demo_that_do_not_fit_are_one_sentence(options: str, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        check(parse_demo(["--dp-attention", *options.split()]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--dp 2", "the target has none: choose --target moe"),
        ("--dp 5 --target moe --tp 2", "8 experts are too few for 10 ranks"),
        ("--dp 0", "--dp must be at least 1"),
        ("--dp 2 --target moe --replica 63", "--replica must be 0 to 62, not 63"),
        ("--dp 2 --target moe --framework jax", "--dp is torch's"),
    ],
)
def test_options_of_an_engine_that_do_not_fit_are_one_sentence(options: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=says):
        parse("prefill", ["--dir", str(tmp_path / "kv"), *options.split()]).check("prefill")
