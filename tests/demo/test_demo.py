"""The main job as a stranger would run it, and what they would get wrong."""

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvproto import Cache, Pool, lay_out
from kvproto.calibration import Host, Probe, save
from kvproto.rank.base import transports_of
from kvproto.transport.bench import Constants, Measured, Sample
from kvproto.transport.nixl.direct import Costs
from kvproto.transport.nixl.transport import NixlTransport
from kvproto_reference.demo.__main__ import main
from kvproto_reference.demo.arguments import parse as parse_demo
from kvproto_reference.demo.options import parse
from kvproto_reference.engine.description import STATES, WINDOW
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.errors import EngineError
from tests.cases import rest
from tests.processes import JAX, Command, Ended, imported

imported("kvproto_reference.demo.__main__", "rich.live", *JAX)

_SESSIONS: set[int] = set()
"""Of the demos of one test."""
DEMO = [sys.executable, "-m", "kvproto_reference.demo"]
FAULTY = str(Path(__file__).with_name("faulty"))
TEXT = "Alice was beginning to get very tired of sitting by her sister\n\nThe cat said\n\nbut the Rabbit actually took a watch out"


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    _SESSIONS.clear()
    yield
    end = time.monotonic() + 20  # what was killed is not dead at once
    while (left := [pid for pid in psutil.pids() if session_of(pid) in _SESSIONS]) and time.monotonic() < end:
        select.select([], [], [], 0.05)
    assert not left
    assert not [p for p in Path("/dev/shm").iterdir() if "kvproto" in p.name]
    if request_may_leave_nothing(tmp_path):
        assert not list(folder.iterdir())


def session_of(pid: int) -> int | None:
    """Every demo is a session of its own, to which whatever it starts belongs."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def request_may_leave_nothing(tmp_path: Path) -> bool:
    """Only a killed demo may leave its directory."""
    return not (tmp_path / "killed").exists()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(TEXT)
    return path


def demo_process(*args: object) -> Ended:
    """The demo as a user starts it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*DEMO, *map(str, args)], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as made:
        _SESSIONS.add(made.pid)
        out, said = made.communicate(timeout=100)
    return Ended(made.returncode, out, said)


def demo(*args: object) -> Ended:
    """The same in a process that has imported torch already."""
    command = Command(main, args)
    _SESSIONS.add(command.pid)
    return command.wait()


def report(result: Ended) -> Any:
    assert result.out, result.said
    return json.loads(result.out)


def right(*args: object) -> Any:
    """The report of a demo in which everything is as it should be."""
    result = demo(*args, "--json")
    assert result.status == 0, result.said
    told = report(result)
    assert told["verdicts"].keys() - {"logprobs"} == {"requests", "checksums", "tokens", "acceptance"}
    assert all(told["verdicts"].values()), told["verdicts"]
    return told


def test_demo_as_in_the_readme() -> None:
    result = demo_process()
    assert result.status == 0, result.said
    for line in ("P0 -> D0", "P1 -> D0", "decode rank 0 awaits 2 (P0, P1)", "24 of 24 equal", "nothing was lost"):
        assert line in result.out
    assert "while prefill still computed" not in result.out


@pytest.mark.parametrize("target", ["mla", "gqa"])
@pytest.mark.parametrize("draft", ["mla", "gqa"])
def test_one_prefill_rank_to_two_decode_ranks(target: str, draft: str, prompts: Path) -> None:
    """Over ipc and, where both have one kind of cache, over TCP with keys (KVP-NET-CURVE)."""
    args = ["--prefill-tp", "1", "--decode-tp", "2", "--target", target, "--draft", draft, "--prompt-file", prompts]
    args += ["--tcp"] if target == draft else []
    told = right(*args, "--max-new", "12")
    assert {(m["source"], m["sink"], m["group"]) for m in told["matrix"]} == {
        (0, d, g) for d in (0, 1) for g in ("target", "draft")
    }
    assert max(r["acceptance"] for r in told["requests"]) > 1.5


@pytest.mark.parametrize(
    "args",
    [
        # features INTENT and SPANS; there are pages for one request and a part of another
        "--spans --part 1 --pages 14 --decode-tp 2 --max-new 24",
        # the bytes are messages, over TCP with keys
        "--transport inline --tcp --max-new 8",
        # four query heads and two KV heads on three ranks: the planner sees owned intervals, no sizes
        "--prefill-tp 3 --decode-tp 2 --target gqa --draft gqa --max-new 12",
        # the hidden states of stages and of context-parallel ranks reach the rank with the head, which is one of two
        "--draft eagle --prefill-tp 1 --prefill-pp 2 --prefill-cp 2 --decode-tp 2 --dcp 2 --decode-draft-tp 1 --max-new 8",
        "--draft eagle --decode-framework jax.distributed --prefill-tp 1 --decode-tp 2 --dcp 2 --dtype bfloat16 --max-new 8",
    ],
    ids=[
        "pages are claimed piece by piece",
        "inside the session",
        "ranks that do not divide the heads",
        "EAGLE-3",
        "EAGLE-3 from torch to ranks of JAX in processes of their own, in bfloat16",
    ],
)
def test_all_is_right(args: str, prompts: Path) -> None:
    right(*args.split(), "--prompt-file", prompts)


@pytest.mark.parametrize(
    "args", ["--speculate 0", "--draft none --decode-tp 2", "--speculate 0 --decode-framework jax"]
)
def test_no_draft(args: str, prompts: Path) -> None:
    told = right(*args.split(), "--prompt-file", prompts, "--max-new", "8")
    assert told["plan"]["groups"] == ["target", "first token"]
    assert {request["acceptance"] for request in told["requests"]} == {1.0}


@pytest.mark.parametrize(("target", "prefill", "decode"), [("mla", 2, 1), ("gqa", 1, 2)])
def test_an_eagle_head(target: str, prefill: int, decode: int, prompts: Path) -> None:
    """Decode proposes from its first step on, from hidden states of the prompt's last token; cold, it does so worse."""
    args = ["--target", target, "--draft", "eagle", "--prefill-tp", prefill, "--decode-tp", decode]
    args += ["--prompt-file", prompts, "--max-new", "12"]
    warm, cold = right(*args), right(*args, "--cold-draft", "zero")
    assert {m["group"] for m in warm["matrix"]} == {"target", "draft"}
    assert {m["group"] for m in cold["matrix"]} == {"target"}
    accepted = [sum(r["acceptance"] for r in told["requests"]) for told in (warm, cold)]
    assert accepted[0] > accepted[1]


@pytest.mark.parametrize(
    "args",
    [
        # pages for one request and a part of another
        "--prefill-tp 1 --decode-tp 2 --pages 8",
        "--prefill-tp 3 --decode-tp 2 --spans --part 1 --pages 14 --chunk 7",
        "--prefill-tp 1 --decode-tp 2 --transport inline --tcp",
        "--prefill-tp 1 --decode-tp 4 --dcp 2 --interleave 4",
        "--prefill-tp 2 --prefill-pp 2 --decode-tp 1 --decode-pp 2 --window-pages 9",
        "--decode-framework jax --prefill-tp 1 --decode-tp 4 --intent",
        *rest(
            "--prefill-tp 1 --decode-tp 1 --speculate 0",
            "--prefill-tp 4 --decode-tp 2 --prefill-page-size 8",
            "--prefill-tp 2 --decode-tp 4 --part 1 --window-pages 9",
            "--prefill-framework jax --prefill-tp 2",
        ),
    ],
)
def test_a_hybrid_target(args: str, prompts: Path) -> None:
    """States with channels in three blocks, and windows, beside full attention and a draft; to other ranks and pages."""
    many = "24" if "--pages" in args else "12"  # so that pages are scarce
    told = right("--target", "hybrid", *args.split(), "--prompt-file", prompts, "--max-new", many)
    groups = {"target", WINDOW, *STATES.values(), "draft"} - ({"draft"} if "--speculate 0" in args else set())
    assert {m["group"] for m in told["matrix"]} == groups
    sent: dict[int, int] = {}
    for moved in told["matrix"]:
        if moved["group"] == STATES["ssm"]:
            sent[moved["sink"]] = sent.get(moved["sink"], 0) + moved["bytes"]
    # of each of two layers and three prompts, four heads of 16 x 16 numbers
    assert sum(sent.values()) == 3 * 2 * 4 * 16 * 16 * 4
    assert told["plan"]["states"][STATES["ssm"]] == max(sent.values()) / 3
    assert len({*sent.values()}) == 1


def test_the_tables_say_which_draft_one_engine_has_and_what_was_sent_early(prompts: Path) -> None:
    sizes = ["--prompt-file", prompts, "--max-new", "8", "--prefill-tp", "1"]
    result = demo("--cold-draft", "zero", "--part", "1", *sizes)
    assert result.status == 0, result.said
    words = " ".join(result.out.split())
    assert "PD and one engine whose draft begins with zero rows too" in words
    assert re.search(r"copied [\d,]+ bytes, [1-9][\d,]* of them while prefill still computed; the others took", words)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_draft_that_prefill_lacks(framework: str, prompts: Path) -> None:
    """KVP-PLAN-COLD: with zero rows fewer proposals are accepted, as by one engine that begins so; tokens stay equal."""
    told = {
        how: right("--cold-draft", how, "--prompt-file", prompts, "--max-new", "12", "--decode-framework", framework)
        for how in ("compute", "zero")
    }
    assert all({m["group"] for m in each["matrix"]} == {"target"} for each in told.values())
    computed, cold = (sum(r["acceptance"] for r in told[how]["requests"]) for how in ("compute", "zero"))
    assert computed > cold


@pytest.mark.parametrize(
    "how", ['{"temperature": 1, "seed": 3, "top_k": 20, "top_p": 0.9}', '{"repetition": 1.2, "stop": ["the"]}']
)
def test_sampling(how: str, prompts: Path) -> None:
    """Both engines and one undivided draw alike, the first token among them."""
    told = right("--sampling", how, "--prompt-file", prompts, "--max-new", "24")
    if "stop" in how:
        assert any(request["text"].endswith("the") for request in told["requests"])


def sampled(text: str) -> SamplingParams | None:
    return parse_demo(["--sampling", text]).sampling


def test_sampling_is_said_in_json_or_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that is no JSON is a text; make passes such options on without quotes."""
    said = sampled("temperature=0.8,top_p=0.9,stop=the,ignore_eos=true")
    assert said == sampled('{"temperature": 0.8, "top_p": 0.9, "stop": "the", "ignore_eos": true}')
    assert said == SamplingParams(temperature=0.8, top_p=0.9, stop="the", ignore_eos=True)
    for wrong, says in (
        ("{temperature:0.8}", "neither NAME=VALUE,... nor a JSON object"),
        ("temperature", "'temperature' is no NAME=VALUE"),
        ("temperature=hot", "temperature must be a number"),
        ("topk=2", "sampling has no 'topk'"),
    ):
        with pytest.raises(SystemExit):
            sampled(wrong)
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "likeliest"),
    [("--prefill-tp 2 --decode-tp 1", 3), ("--prefill-tp 1 --decode-pp 2 --draft eagle", 0)],
    ids=["drawn, with the likeliest", "the drawn token alone"],
)
def test_log_probabilities(args: str, likeliest: int, prompts: Path) -> None:
    """Those of the first token come from prefill; all are the model's own, of one undivided engine."""
    how = json.dumps({"temperature": 1, "seed": 3, "logprobs": likeliest})
    result = demo(*args.split(), "--sampling", how, "--prompt-file", prompts, "--max-new", "12", "--json")
    told = report(result)
    assert (result.status, told["verdicts"].pop("logprobs")) == (0, True), result.said
    for request in told["requests"]:
        assert [[found[0][0], len(found)] for found in request["logprobs"]] == [
            [token, 1 + likeliest] for token in request["tokens"]
        ]
        for found in request["logprobs"]:
            values = [p for _, p in found[1:]]
            assert values == sorted(values, reverse=True)
            assert found[0][1] <= max([0.0, *values])


def test_log_probabilities_that_an_engine_does_not_have(tmp_path: Path) -> None:
    options = ["--dir", str(tmp_path / "kv"), "--max-logprobs"]
    assert parse("decode", [*options, "2"]).max_logprobs == 2
    with pytest.raises(EngineError, match="--max-logprobs must be at least 0, not -1"):
        parse("decode", [*options, "-1"])


def test_one_rank_sends_what_several_have(prompts: Path) -> None:
    """KVP-PLAN-SPREAD."""
    told = right("--spread", "one", "--prompt-file", prompts, "--max-new", "8")
    assert {m["source"] for m in told["matrix"] if m["group"] == "target"} == {0}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--speculate -1", "--speculate must be 0, for no draft, or more, not -1"),
        ("--speculate 0 --cold-draft", "--cold-draft and --tiers are with a draft"),
        ("--draft none --tiers", "--cold-draft and --tiers are with a draft"),
        ("--draft none --draft-sharded", "--draft-tp and --draft-sharded are of a draft"),
    ],
)
def test_options_of_a_draft_that_there_is_not(args: str, says: str) -> None:
    result = demo(*args.split())
    assert (result.status, says in result.said) == (1, True), result.said


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.parametrize("measured", [False, True])
def test_over_nixl(prompts: Path, tmp_path: Path, measured: bool) -> None:
    args: list[str | Path] = []
    if measured:  # packing is slow there: what is longer than 250 bytes is written directly
        links, some = {"direct": 1e9, "packed": 2e8}, (Sample(1 << 20, 1, 1e-3),)
        ways = (Measured("nixl", way, "host", "host", some, Constants(n, 1e-6, 1e-6)) for way, n in links.items())
        args = ["--costs", tmp_path / "costs.json"]
        save(Probe("2026-01-02T03:04:05+00:00", True, 1 << 29, Host(2, "x86_64"), tuple(ways)), tmp_path / "costs.json")
        options = parse("decode", ["--dir", str(tmp_path), "--transport", "nixl", *map(str, args)])
        chosen = options.kvproto()
        with Pool.allocate(lay_out([Cache.mla("kv", 1, latent=8, rope=8, page=4)]), 1) as pool:
            (tuned,) = transports_of(chosen, pool)
            assert isinstance(tuned, NixlTransport)
            assert tuned.mode == Costs(1e-6, 1e9, 0.2)
            tuned.close()
    told = right("--transport", "nixl", "--prompt-file", prompts, "--max-new", "12", *args)
    assert {(m["source"], m["sink"], m["group"]) for m in told["matrix"]} == {
        (p, 0, g) for p in (0, 1) for g in ("target", "draft")
    }


@pytest.mark.parametrize("tp", [("1", "2"), ("2", "1")])
def test_layers_are_sent_while_later_ones_compute(tp: tuple[str, str]) -> None:
    args = ["--prefill-tp", tp[0], "--decode-tp", tp[1], "--json", "--max-new", "8"]
    told = []
    for part in ([], ["--part", "1"]):
        result = demo(*args, *part)
        assert result.status == 0, result.said
        told.append(report(result))
    at_once, parts = told
    assert parts["verdicts"] == {"requests": True, "checksums": True, "tokens": True, "acceptance": True}
    assert parts["matrix"] == at_once["matrix"]
    assert [r["tokens"] for r in parts["requests"]] == [r["tokens"] for r in at_once["requests"]]
    total = sum(m["bytes"] for m in parts["matrix"])
    assert at_once["left"] == total
    assert parts["left"] < total


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_decode_reads(prefill: int, decode: int, prompts: Path) -> None:
    ranks = ["--prefill-tp", prefill, "--decode-tp", decode]
    told = right("--pull", *ranks, "--prompt-file", prompts, "--max-new", "12")
    pairs = {(p, d, g) for p in range(prefill) for d in range(decode) for g in ("target", "draft")}
    assert {(m["source"], m["sink"], m["group"]) for m in told["matrix"]} == pairs


def test_first_token_that_ends_the_text() -> None:
    result = demo("--json", "--target", "gqa", "--prefill-tp", "1", "--max-new", "8")
    assert result.status == 0, result.said
    (request,) = [r for r in report(result)["requests"] if r["name"] == "a whole document"]
    assert request["tokens"] == [256]


def test_a_page_for_people_and_its_picture(prompts: Path, tmp_path: Path) -> None:
    """Pages of 8 tokens to pages of 32, both engines with two ranks."""
    sizes = ["--prefill-page-size", "8", "--decode-page-size", "32", "--decode-tp", "2", "--max-new", "12"]
    result = demo("--overview", "--prompt-file", prompts, *sizes, "--picture", tmp_path / "page.svg")
    assert result.status == 0, result.said
    for line in (
        "prefill engine  torch, 2 processes, TP 2, pages of 8 tokens",
        "decode engine   torch, 2 processes, TP 2, pages of 32 tokens",
        "3 of 3 prompts were answered",
        "36 of 36 tokens are those that one undivided engine writes",
    ):
        assert line in result.out
    assert "<svg" in (tmp_path / "page.svg").read_text()


@pytest.mark.usefixtures("faulty")
def test_the_page_says_where_tokens_differ(prompts: Path) -> None:
    args = ["--transport", "flips-target", "--no-verify", "--prefill-tp", "1", "--prompt-file", prompts]
    result = demo("--overview", *args, "--max-new", "12")
    assert result.status == 1
    assert "NOT as one undivided engine" in result.out
    assert re.search(r"from\W+token", result.out)
    assert "of 36 tokens are those" in result.out


def test_a_picture_that_cannot_be_written(prompts: Path, tmp_path: Path) -> None:
    result = demo("--prompt-file", prompts, "--max-new", "1", "--picture", tmp_path / "none" / "page.svg")
    assert result.status == 1
    assert "page.svg cannot be written: No such file" in result.said


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's transports are installed, which flip a bit of what they copy."""
    monkeypatch.syspath_prepend(FAULTY)


def flipped(group: str, prompts: Path, *args: str) -> tuple[int, Any]:
    options = f"--transport flips-{group} --prefill-tp 1 --json --max-new 24 --prompt-file".split()
    result = demo(*options, prompts, *args)
    return result.status, report(result)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("group", ["target", "draft"])
def test_flipped_bit_fails_verify_and_the_demo(group: str, prompts: Path) -> None:
    status, told = flipped(group, prompts)
    assert status == 1
    assert not told["verdicts"]["checksums"]
    assert all(f"VERIFY_FAILED at checksums[{group}]" in r["error"] for r in told["requests"])


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flipped_target_changes_tokens_without_verify(prompts: Path, dtype: str) -> None:
    """No token of a damaged cache is taken for one that rounding has changed."""
    status, told = flipped("target", prompts, "--no-verify", "--dtype", dtype)
    assert status == 1
    assert not told["verdicts"]["tokens"]


def test_tokens_that_16_bits_have_rounded_are_no_fault() -> None:
    result = demo("--dtype", "bfloat16", "--json")
    told = report(result)
    assert (result.status, told["identical"]) == (0, True), result.said
    assert not all(request["same_tokens"] for request in told["requests"])


@pytest.mark.usefixtures("faulty")
def test_flipped_draft_changes_acceptance_but_no_token_without_verify(prompts: Path) -> None:
    status, told = flipped("draft", prompts, "--no-verify")
    assert status == 1
    assert told["verdicts"]["tokens"]
    assert not told["verdicts"]["acceptance"]


def bad_prompts(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    return path


def test_empty_prompt_file(tmp_path: Path) -> None:
    result = demo("--prompt-file", bad_prompts(tmp_path, "\n\n"))
    assert result.status == 1
    assert "has no prompt in it" in result.said
    assert "Traceback" not in result.said


def test_missing_prompt_file_and_checkpoint(tmp_path: Path) -> None:
    result = demo("--prompt-file", tmp_path / "none.txt")
    assert (result.status, "cannot be read" in result.said) == (1, True)
    result = demo("--target", tmp_path / "none")
    assert result.status == 1
    assert f"checkpoint folder {tmp_path / 'none'} does not exist" in result.said
    assert "Traceback" not in result.said


@pytest.mark.parametrize("page", [(), ("--overview",)], ids=["tables", "overview"])
def test_nothing_is_compared_where_no_request_is_served(page: tuple[str, ...], tmp_path: Path) -> None:
    """And no cell of a route says that bytes went; the demo fails all the same."""
    path = bad_prompts(tmp_path, "Alice was beginning to get very tired")
    result = demo("--prompt-file", path, "--pages", "1", "--max-new", "4", "--prefill-tp", "1", *page)
    assert result.status == 1
    assert re.search("prompt 1:? failed", result.out)
    assert len(re.findall(r"(checksums|tokens|acceptance):? +nothing compared", result.out)) == 3
    assert "DIFFER" not in result.out
    assert "in Done" not in result.out


def test_prompt_too_long_for_the_pools_leaves_the_others_alone(tmp_path: Path) -> None:
    path = bad_prompts(tmp_path, "Alice " * 60 + "\n\nAlice was")
    result = demo("--prompt-file", path, "--pages", "8", "--json", "--max-new", "8", "--prefill-tp", "1")
    assert result.status == 1
    long, short = report(result)["requests"]
    assert "pages" in long["error"]
    assert short["error"] is None
    assert short["same_tokens"]


@pytest.mark.parametrize("more", ["", "--decode-tp 2", *rest("--intent", "--spans")])
def test_many_requests_and_few_pages(more: str, tmp_path: Path) -> None:
    """Pages that the last running request frees are given to the next at once: none waits for its deadline."""
    path = bad_prompts(tmp_path, "\n\n".join(f"{n} times Alice was beginning" for n in range(20)))
    result = demo("--prompt-file", path, "--pages", "4", "--json", "--max-new", "8", "--prefill-tp", "1", *more.split())
    told = report(result)
    assert told["identical"], result.said
    assert [request["lost"] for request in told["requests"]] == 20 * [[]]


@pytest.mark.parametrize(
    "args",
    [
        '--decode-tp 2 --sampling {"temperature":1,"seed":3}',
        "--spans --part 1 --decode-pp 2",
        "--draft eagle --cold-draft zero",
        "--speculate 0 --decode-framework jax",
        # states begin again, and so do the windows' pages
        '--target hybrid --prefill-tp 2 --chunk 8 --window-pages 24 --sampling {"temperature":1,"seed":3,"logprobs":1}',
        *rest(
            "--decode-tp 2 --dcp 2 --target gqa --intent",
            "--cold-draft zero",
            "--target hybrid --decode-framework jax --decode-tp 2 --chunk 8 --window-pages 24",
        ),
    ],
)
def test_answers_outgrow_the_pages(args: str, tmp_path: Path) -> None:
    """The youngest gives way and is computed again by decode: tokens and acceptance are those of one engine."""
    words = "times Alice was beginning to get very tired of sitting by her sister"
    path = bad_prompts(tmp_path, "\n\n".join(f"{n} {words}"[: 30 + 6 * n] for n in range(5)))
    told = right("--prompt-file", path, "--pages", "9", "--max-new", "40", "--prefill-tp", "1", *args.split())
    assert sum(request["gave_way"] for request in told["requests"]) > 0
    assert [request["lost"] for request in told["requests"]] == 5 * [[]]


def test_more_ranks_than_heads() -> None:
    result = demo("--prefill-tp", "5", "--decode-tp", "1")
    assert result.status == 1
    assert "Traceback" not in result.said
    assert "error:" in result.said


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_demo_leaves_nothing(stop: signal.Signals, tmp_path: Path) -> None:
    folder_of_all = tmp_path / "tmp"
    if stop == signal.SIGKILL:
        (tmp_path / "killed").touch()
    command = Command(main, ["--max-new", 400])
    _SESSIONS.add(command.pid)
    engines: list[psutil.Process] = []

    def all_run() -> Path | None:
        engines[:] = psutil.Process(command.pid).children(recursive=True)
        return next(iter(folder_of_all.glob("kvproto-*/kv-0-1")), None) if len(engines) >= 3 else None

    folder = when(all_run, command)
    if stop == signal.SIGINT:
        os.killpg(command.pid, stop)
    else:
        os.kill(command.pid, stop)
    assert command.wait(60).status != 0
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive
    assert stop == signal.SIGKILL or not folder.parent.exists()


def when(found: Any, command: Command) -> Path:
    """What `found` gives, as soon as it gives something."""
    while command.process.exitcode is None:
        if path := found():
            assert isinstance(path, Path)
            return path
        command.process.join(0.05)
    raise AssertionError("ended before")
