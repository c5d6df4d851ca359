"""Each program of examples/ runs by itself, and those that are shown as short are short."""

import ast
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Command, imported

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as `python examples/...` does

from handover_table import HANDOVERS  # noqa: E402

imported(__name__, "kvproto.asyncio", "torch")


def lines_of(name: str) -> list[str]:
    """Lines of code: no blank ones, comments or docstrings."""
    text = (EXAMPLES / name).read_text()
    docs = {
        n
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for n in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return [line for n, line in lines if n not in docs and line.strip() and not line.strip().startswith("#")]


def example() -> None:
    """What `python examples/...` does, in a process that has imported torch already."""
    del sys.argv[0]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")


def forked(*arguments: str) -> str:
    status, out, said = Command(example, arguments).wait()
    assert (status, said) == (0, "")
    return out


def run(*arguments: str, stdin: str = "") -> str:
    """As a user does."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES.parent, input=stdin, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["source.py", "sink.py"])
def test_a_role_takes_twelve_lines_beside_the_engine_s_own(name: str) -> None:
    assert len([line for line in lines_of(name) if not line.endswith("# own")]) <= 12


def test_both_roles_take_24_lines_with_imports() -> None:
    assert len(lines_of("smallest.py")) <= 24


def test_smallest() -> None:
    assert run("examples/smallest.py").startswith("Arrived(")


def test_source_and_sink_are_processes_of_their_own() -> None:
    with subprocess.Popen(
        [sys.executable, "examples/source.py"], cwd=EXAMPLES.parent, stdout=subprocess.PIPE, text=True
    ) as source:
        assert source.stdout is not None
        assert "bytes in" in run("examples/sink.py", stdin=source.stdout.readline())
        assert source.wait(60) == 0


@pytest.mark.parametrize("arguments", [[], ["--apart"]])
def test_a_torch_engine_with_a_tensor_a_layer(arguments: list[str]) -> None:
    pytest.importorskip("torch")
    assert forked("examples/torch_paged.py", *arguments) == "35840 bytes, equal\n"


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
def test_pools_that_jax_reads() -> None:
    refused, moved = run("examples/jax_pool.py").splitlines()
    assert "kvproto.allocate" in refused
    assert moved == "16384 bytes, equal"


def test_a_sliding_window_whose_old_pages_are_given_up() -> None:
    assert forked("examples/sliding_window.py") == "15232 bytes, equal\n"


def test_an_adapter_for_an_engine_that_steps() -> None:
    """It says by itself whether every page came back."""
    assert forked("examples/adapter.py") == "2 arrived, 1 ended: ABORTED (the client is gone)\n"


@pytest.mark.parametrize(
    ("example", "end", "where", "there"),
    [
        ("tiers", "True", r"^0 device, 16 host", [False] * 3 + [True] * 3),
        ("hybrid", "same: True", " 0 from the host", [True] * 4 + [False] * 5),
    ],
)
def test_pages_and_recurrent_states_are_found_again_wherever_they_went(
    example: str, end: str, where: str, there: list[bool]
) -> None:
    said = forked(f"examples/{example}.py").splitlines()
    assert all(line.endswith(end) for line in said)
    assert [bool(re.search(where, line)) for line in said] == there


def test_a_storage_node_takes_pages_of_one_engine_and_serves_them_to_another() -> None:
    """From its folder, then from its pool; what it has not is computed."""
    assert forked("examples/storage_node.py").splitlines() == [
        "the node took 192 tokens of prefill",
        "the node took 64 tokens of prefill",  # those before are here
        "the node served 0 pages of the device, 16 of the host",
        "decode has 256 tokens, True",
        "the node served 16 pages of the device, 0 of the host",
        "decode has 256 tokens, True",
        "the node served not all here",
        "decode computes: ABORTED",
    ]


def test_asyncio() -> None:
    assert forked("examples/asyncio_engine.py") == "8 requests, all equal\n"


def test_a_router_tries_again_with_a_new_ticket() -> None:
    said = forked("examples/router.py").splitlines()
    assert said.count("blue: arrived") == 6
    assert any("no free pages" in line for line in said)


def test_hand_overs_are_listed() -> None:
    said = forked("examples/handovers.py", "--list").splitlines()
    assert len(said) == 2 + len(HANDOVERS) == 11


@pytest.mark.parametrize("case", HANDOVERS, ids=lambda case: case.name)
def test_hand_over(case: object) -> None:
    import handovers

    found = handovers.run(case)  # type: ignore[arg-type]
    assert 0 < found["bytes"] <= found["compared"]


def test_a_byte_that_is_wrong_is_found() -> None:
    import handovers

    case = HANDOVERS[0]
    cache = handovers.RankCache.of(case.sink, 0, case.tokens, 100)
    for place, image in cache.image(0, case.tokens, handovers.UNTOUCHED).items():
        cache.pool.array(*place)[:] = image
    assert handovers.check(case, cache) > 0
    cache.pool.array("draft", 0, "v")[7, 3, 2, 1] ^= 1
    with pytest.raises(AssertionError, match=r"1 bytes differ, first at \[7 3 2 1\]"):
        handovers.check(case, cache)
