"""Options of `make demo ARGS=...`."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from .. import smollm2
from ..cache.forms import MODEL
from ..checkpoint import load_config
from ..engine.sampling import SamplingParams
from ..errors import EngineError
from .options import (
    COLD,
    DEAL,
    FRAMEWORKS,
    POOLS,
    SPECULATE,
    TRANSPORT_HELP,
    add_adapters,
    add_back_end,
    add_captured,
    add_dcp,
    add_models,
    add_role_forms,
    add_spread,
    add_stages,
    checkpoint_folder,
)
from .trouble import KINDS


@attrs.frozen(kw_only=True)
class DemoOptions:
    """The options of `make demo ARGS=...`."""

    prefill_tp: int = 2
    decode_tp: int = 1
    prefill_framework: str = "torch"
    decode_framework: str = "torch"
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_virtual: int = 1
    decode_virtual: int = 1
    prefill_draft_tp: int | None = None
    decode_draft_tp: int | None = None
    prefill_cp: int = 1
    prefill_interleave: int = 16
    prefill_deal: str = "cyclic"
    prefill_dp: int = 1
    decode_dp: int = 1
    dp_attention: bool = False
    dcp: int = 1
    interleave: int = 1
    deal: str = "cyclic"
    draft_sharded: bool = False
    exchange: str = "a2a"
    replicate_q: bool = False
    back_end: str = "torch"
    captured: bool = False
    prefill_kv_dtype: str = MODEL
    decode_kv_dtype: str = MODEL
    target: str = "mla"
    draft: str = "gqa"
    dtype: str = "float32"
    transport: str = "shm"
    prefill_devices: str | None = None
    decode_devices: str | None = None
    real: bool = False
    chat: bool = False
    prompt_file: Path | None = None
    json: bool = False
    verify: bool = True
    pull: bool = False
    intent: bool = False
    spans: bool = False
    pools: str = "own"
    max_new: int = 48
    page_size: int = 16
    prefill_page_size: int | None = None
    decode_page_size: int | None = None
    chunk: int = 64
    speculate: int = 4
    sampling: SamplingParams | None = None
    spread: str = "even"
    cold_draft: str | None = None
    part: int | None = None
    costs: Path | None = None
    pages: int = 160
    window_pages: int | None = None
    tcp: bool = False
    namespaces: bool = False
    attach: Path | None = None
    trouble: str | None = None
    down: float | None = None
    overview: bool = False
    tiers: bool = False
    adapter: list[tuple[str, Path]] = attrs.Factory(list)
    images: bool = False
    encoder_tp: int = 2
    encoder_seed: int = 0
    picture: Path | None = None

    @property
    def drafts(self) -> bool:
        """Whether decode has a draft."""
        return self.draft != "none" and self.speculate > 0

    def page_size_of(self, role: str) -> int:
        """Tokens of a page of the prefill or of the decode engine."""
        own: int | None = getattr(self, f"{role}_page_size")
        return self.page_size if own is None else own


def parse(argv: list[str] | None) -> DemoOptions:
    """Options from the command line."""
    parser = argparse.ArgumentParser(
        prog="make demo", description="Hand over the KV cache of a target and a draft for real text, and prove it."
    )
    add = parser.add_argument
    real = "let SmolLM2-135M-Instruct (Apache-2.0) answer a batch of chats, page 16 to 32"
    add("--real", action="store_true", help=real)
    add("--prefill-tp", type=int, default=2, help="tensor-parallel ranks of the prefill engine (default 2)")
    add("--decode-tp", type=int, default=1, help="tensor-parallel ranks of the decode engine (default 1)")
    for role in ("prefill", "decode"):
        add(
            f"--{role}-framework",
            choices=FRAMEWORKS,
            default="torch",
            help=f"framework in which {role} computes (default torch)",
        )
        add_stages(parser, f"{role}-")
    add("--prefill-cp", type=int, default=1, help="context-parallel ranks of prefill for each TP rank (default 1)")
    add("--prefill-interleave", type=int, default=16, help="consecutive tokens that one of them stores (default 16)")
    add("--prefill-deal", default="cyclic", metavar="NAME|R,R,...", help=DEAL)
    _add_replicas(add)
    add_dcp(parser)
    add_back_end(parser)
    add_captured(parser)
    add_role_forms(parser)
    add_models(parser)
    add("--transport", default="shm", metavar="NAME", help=TRANSPORT_HELP)
    gpus = "GPUs of its ranks, in turn; with --transport cuda (default: the {} half) or nixl (default: the host)"
    add("--prefill-devices", metavar="N,N,...", help=gpus.format("first"))
    add("--decode-devices", metavar="N,N,...", help=gpus.format("second"))
    _add_prompts(add)
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--no-verify", dest="verify", action="store_false", help="leave out feature VERIFY, the checksums")
    add("--pools", choices=POOLS, default="own", help="who allocates the pools: kvproto, or JAX with --transport cuda")
    add("--pull", action="store_true", help="let decode read what prefill offers (draft feature PULL)")
    add("--intent", action="store_true", help="let decode claim pages when prefill is over (draft feature INTENT)")
    add("--spans", action="store_true", help="let decode claim pages piece by piece while prefill runs (draft SPANS)")
    add("--page-size", type=int, default=16, help="tokens per page (default 16)")
    for role in ("prefill", "decode"):
        add(f"--{role}-page-size", type=int, metavar="N", help=f"tokens per page of {role}, if different")
    add("--chunk", type=int, default=64, help="prompt tokens per prefill step (default 64)")
    add_spread(parser)
    add_adapters(parser)
    add("--cold-draft", choices=COLD, nargs="?", const=COLD[0],
        help="prefill has no draft: decode's begins with zero rows, or computes them (default compute)")  # fmt: skip
    add("--pages", type=int, default=160, help="pages in each pool (default 160)")
    add("--part", type=int, help="least bytes that prefill sends at a time while it computes (default 16 MiB)")
    add("--costs", type=Path, metavar="FILE", help="results of `kvproto probe`, which say what runs are long")
    add("--tcp", action="store_true", help="run sessions over loopback TCP, encrypted by CURVE, instead of ipc")
    add(
        "--namespaces", action="store_true", help="the same, with each engine in its own network namespace (needs root)"
    )
    add("--attach", type=Path, metavar="DIR", help="use engines that already run with --dir DIR")
    for kind in KINDS:
        text = f"have prefill {kind.says} while it works" + (", and started again" if kind.ends else "")
        add(f"--{kind.name}", dest="trouble", action="store_const", const=kind.name, help=text)
    add("--down", type=float, metavar="SECONDS", help="how long it is then away (default 0; with --pause 12)")
    add(
        "--tiers",
        action="store_true",
        help="run one engine, with conversations that do not fit on its device (--prefill-framework jax: in JAX)",
    )
    add("--overview", action="store_true", help="print the answers and the proof instead of tables")
    add("--picture", type=Path, metavar="FILE", help="also write the output as an SVG picture")
    if parser.parse_known_args(argv)[0].real:
        parser.set_defaults(**REAL)
    return DemoOptions(**vars(parser.parse_args(argv)))


def _add_replicas(add: Callable[..., object]) -> None:
    """Add the options of replicas."""
    add("--prefill-dp", type=int, default=1, help="data-parallel replicas of the prefill engine (default 1)")
    add("--decode-dp", type=int, default=1, help="data-parallel replicas of the decode engine (default 1)")
    shared = "let the replicas of an engine share the experts of the target: DP attention with expert parallel"
    add("--dp-attention", action="store_true", help=shared)


def _add_prompts(add: Callable[..., object]) -> None:
    """Add the options of prompts and of sampling."""
    add("--prompt-file", type=Path, help="prompts separated by blank lines")
    add("--chat", action="store_true", help="treat each prompt as a user's message, in the model's chat template")
    how = """how to sample all prompts, such as temperature=0.8,top_p=0.9 or in JSON '{"temperature": 0.8, "stop":
        [",", "."]}'; also seed, top_k, repetition, presence, frequency, ignore_eos and logprobs (default: greedy, but
        one prompt)"""
    add("--sampling", type=_sampling, metavar="NAME=VALUE,...", help=how)
    add("--images", action="store_true", help="prompts with images, for which an encoder engine hands rows to prefill")
    add("--encoder-tp", type=int, default=2, help="tensor-parallel ranks of the encoder, with --images (default 2)")
    add("--encoder-seed", type=int, default=0, help="seed of its weights; prefill expects 0, and refuses any other")
    add("--max-new", type=int, default=48, help="tokens to generate for each prompt (default 48)")
    add("--speculate", type=int, default=4, help=SPECULATE)


def _sampling(text: str) -> SamplingParams:
    try:
        said = json.loads(text) if text.startswith("{") else dict(_pair(pair) for pair in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"neither NAME=VALUE,... nor a JSON object: {error}") from None
    try:
        return SamplingParams.of(said)
    except EngineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pair(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE, which is a text if it is no JSON; raises ValueError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is no NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


REAL = {
    "target": str(smollm2.FOLDER),
    "draft": "eagle",
    "chat": True,
    "overview": True,
    "decode_page_size": 32,
    "chunk": 256,
    "speculate": 3,
    "max_new": 48,
}
"""Defaults that --real changes."""


def check(options: DemoOptions) -> None:
    """Raise EngineError for options that do not go together, or are out of range."""
    sizes = {name: getattr(options, name) for name in SIZES}
    refused: tuple[tuple[object, str], ...] = (
        (any(size is not None and size < 1 for size in sizes.values()),
         ", ".join(f"--{name.replace('_', '-')}" for name in SIZES) + " must be at least 1"),
        (options.speculate < 0, f"--speculate must be 0, for no draft, or more, not {options.speculate}"),
        (not options.drafts and (options.cold_draft or options.tiers),
         "--cold-draft and --tiers are with a draft: leave them out, or give one by --draft and --speculate"),
        (options.trouble and options.attach,
         "--kill, --drain, --sleep and --pause are for engines that the demo starts: leave --attach out"),
        (options.real and options.attach is not None,
         "--real starts engines of its own: leave --attach out, or --real, and say by --model which models yours have"),
        (options.real and options.target != REAL["target"], "--real brings a model of its own: leave --model out"),
        (options.overview and options.attach is not None,
         "--overview tells of engines that the demo starts: leave --attach out"),
        (options.tiers and (options.attach is not None or options.trouble),
         "--tiers is of one engine: leave --attach, --kill, --drain, --sleep and --pause out"),
        (options.json and options.picture, "--picture is of what is printed for people: leave --json out"),
        (options.adapter and (options.tiers or options.images or options.trouble),
         "--adapter sends each prompt without an adapter and with each: leave --tiers, --images, --kill, --drain,"
         " --sleep and --pause out"),
        (len({options.prefill_kv_dtype, options.decode_kv_dtype} - {MODEL}) > 1,
         "two forms of FP8 are not converted into each other: choose one, or leave --prefill-kv-dtype out"),
        *(_dp_attention(options) if options.dp_attention else ()),
        *(_images(options) if options.images else ()),
    )  # fmt: skip
    for wrong, says in refused:
        if wrong:
            raise EngineError(says)


def _images(options: DemoOptions) -> Iterable[tuple[object, str]]:
    """Options that do not go together with --images, and the reasons."""
    yield (
        options.tiers or options.real or options.chat or options.prompt_file,
        "--images brings prompts of its own: leave --tiers, --real, --chat and --prompt-file out",
    )
    yield options.dtype != "float32", "--images compares tokens in 32 bits: leave --dtype out"
    jax = any(getattr(options, f"{role}_framework") == "jax" for role in ("prefill", "decode"))
    yield jax, "--images is torch's: leave --prefill-framework and --decode-framework jax out"
    yield options.transport == "cuda", "--images moves rows in memory of the host: choose --transport shm or inline"


def _dp_attention(options: DemoOptions) -> Iterable[tuple[object, str]]:
    """Options that --dp-attention excludes, with the reasons."""
    yield (
        options.attach is not None,
        "--dp-attention is for engines that the demo starts: leave it out, and start yours with --dp",
    )
    sides = [role for role in ("prefill", "decode") if getattr(options, f"{role}_dp") > 1]
    yield not sides, "--dp-attention is of replicas: give their number by --prefill-dp or --decode-dp"
    has = not options.real and load_config(checkpoint_folder("target", options.target), options.dtype).moe is not None
    yield (
        not has,
        "--dp-attention shares experts, and this target has none: choose --target moe or another with experts,"
        " or leave --dp-attention out, for replicas that share nothing",
    )
    for role in sides:
        yield (
            getattr(options, f"{role}_framework") == "jax",
            f"--dp-attention is torch's: leave --{role}-framework jax out, or --{role}-dp",
        )


SIZES = (
    "max_new", "page_size", "prefill_page_size", "decode_page_size", "prefill_dp", "decode_dp", "chunk",
    "encoder_tp",
)  # fmt: skip
"""Options that count something, and must be at least 1."""
