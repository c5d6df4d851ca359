"""Prefill and decode engines with LoRA adapters and tenants: tokens, what is shared, and what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvproto_reference.adapters import Adapters, draw_adapter
from kvproto_reference.checkpoint import CHECKPOINTS
from kvproto_reference.demo import decode, prefill
from kvproto_reference.demo.engines import Engines
from kvproto_reference.demo.prompts import Prompt
from kvproto_reference.demo.router import Request, Router
from kvproto_reference.engine.undivided import Undivided
from tests.demo.test_demo import demo, nothing_is_left_behind, prompts, report
from tests.processes import imported
from tests.reference.adapters import two

__all__ = ["nothing_is_left_behind", "prompts"]
imported("kvproto_reference.demo.__main__")

MLA, DRAFT = CHECKPOINTS / "target-mla", CHECKPOINTS / "draft-gqa"
PROMPT = [*b"The Cheshire Cat said: the cache that you lost is not mine, and what I have is of another one"]
NEW = 12
WAYS = [("", ""), ("red", ""), ("blue", ""), ("", "tenant"), ("red", "tenant")]
"""Adapters and tenants."""


def given(adapters: Adapters) -> list[str]:
    return [f"--adapter={name}={each.folder}" for name, each in adapters.items()]


@contextmanager
def pair(folder: Path, source: list[str], sink: list[str]) -> Iterator[Router]:
    """A prefill and a decode engine with these options, and their router."""
    folder.mkdir(mode=0o700)
    with Engines() as engines:
        engines.start("prefill-0", prefill.main, ["--dir", str(folder), *source])
        engines.start("decode-0", decode.main, ["--dir", str(folder), "--quiet", *sink])
        router = Router(folder, "prefill", engines)
        router.wait_ready(60)
        yield router
        router.stop()
        router.close()


def asked(router: Router, adapter: str = "", tenant: str = "") -> Request:
    """One request, served or refused."""
    router.submit([Prompt(name="one", tokens=PROMPT, adapter=adapter, cache_salt=tenant)], NEW)
    router.collect(lambda request: None)
    return router.requests[-1]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("mla", "--prefill-tp 2 --prefill-cp 2 --decode-tp 2 --dcp 2 --interleave 4"),
        ("gqa", "--draft eagle --prefill-tp 3 --prefill-pp 2 --decode-tp 2 --pages 40"),
        ("hybrid", "--prefill-tp 2 --decode-pp 2 --max-new 24"),
        ("moe", "--dp-attention --decode-dp 2"),
    ],
)
def test_tokens_are_those_of_one_engine_with_the_same_adapters(
    target: str, args: str, tmp_path: Path, prompts: Path
) -> None:
    adapters = two(tmp_path / "adapters", CHECKPOINTS / f"target-{target}")
    asked = ["--prompt-file", prompts, "--max-new", "12"]
    result = demo("--target", target, *asked, *args.split(), *given(adapters), "--json")
    assert result.status == 0, result.said
    told = report(result)
    assert told["verdicts"] == dict.fromkeys(("requests", "checksums", "tokens", "acceptance", "adapters"), True)


@pytest.mark.parametrize("keeper", ["nobody", "prefill", "decode"])
def test_rows_are_found_again_by_requests_of_the_same_adapter_and_tenant(keeper: str, tmp_path: Path) -> None:
    """`keeper` has --host-pages; decode without it keeps prefixes on the device."""
    adapters = two(tmp_path / "adapters", MLA)
    right = Undivided(MLA, DRAFT, adapters=adapters)
    kept = ["--host-pages", "80", "--storage", str(tmp_path / "storage")]
    source, sink = (given(adapters) + (kept if keeper == role else []) for role in ("prefill", "decode"))
    with pair(tmp_path / "kv", source, sink) as router:
        for again in (False, True):
            for adapter, tenant in WAYS:
                request = asked(router, adapter, tenant)
                assert request.error is None
                assert request.tokens == right.generate(PROMPT, max_new=NEW, adapter=adapter).tokens
                found = request.cached if keeper != "prefill" else sum(request.found["prefill"].values())
                assert bool(found) == again, (adapter, tenant)


def test_a_decode_engine_without_the_adapter_refuses_it_by_code(tmp_path: Path) -> None:
    adapters = two(tmp_path / "adapters", MLA)
    with pair(tmp_path / "kv", given(adapters), []) as router:
        request = asked(router, "red")
        assert "CONTENT_MISMATCH at adapter" in str(request.error)
        assert "--adapter red=DIR" in str(request.error)
        assert request.sent == []
        assert asked(router).error is None


def test_a_decode_engine_with_other_weights_of_that_name_gets_no_bytes(tmp_path: Path) -> None:
    ours = draw_adapter(tmp_path / "ours", MLA, 1)
    theirs = draw_adapter(tmp_path / "theirs", MLA, 2)
    with pair(tmp_path / "kv", [f"--adapter=red={ours}"], [f"--adapter=red={theirs}"]) as router:
        request = asked(router, "red")
        assert "CONTENT_MISMATCH" in str(request.error)
        assert "adapter" in str(request.error)
        assert request.sent == []
        assert asked(router).error is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prefill-framework", "jax"], "--adapter is torch's"),
        (["--tiers"], "--adapter sends each prompt without an adapter and with each"),
        (["--captured"], "--captured"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(args: list[str], says: str, tmp_path: Path) -> None:
    result = demo("--adapter", f"red={draw_adapter(tmp_path / 'red', MLA, 1)}", *args)
    assert result.status == 1
    assert says in result.said


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    result = demo("--adapter", f"red={tmp_path}")
    assert result.status == 1
    assert "adapter_config.json" in result.said
