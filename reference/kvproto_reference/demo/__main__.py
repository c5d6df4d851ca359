"""`make demo`: prefill engine, decode engine, router, and the undivided engine that they are compared with."""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvproto.errors import KvprotoError

from ..cache.memory import device_of
from ..engine.sampling import SamplingParams
from ..engine.sequence import SpeculationStats
from ..engine.undivided import Undivided
from ..errors import EngineError
from ..tokenizer import Tokenizer
from . import decode, prefill
from .engines import Engines
from .network import free_address, key_folders, namespaces
from .options import (
    DEAL,
    FRAMEWORKS,
    POOLS,
    STAGES,
    TRANSPORT_HELP,
    add_back_end,
    add_captured,
    add_dcp,
    add_models,
    add_stages,
    checkpoint_folder,
    numbers,
    shared_tokenizer,
)
from .prompts import Prompt, default_prompts, read_prompts
from .report import Compared, Notes, as_json, show, verdict
from .router import LOAD, START, Request, Router
from .trouble import KINDS, Trouble


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
    dcp: int = 1
    interleave: int = 1
    deal: str = "cyclic"
    draft_sharded: bool = False
    exchange: str = "a2a"
    replicate_q: bool = False
    back_end: str = "torch"
    captured: bool = False
    target: str = "mla"
    draft: str = "gqa"
    dtype: str = "float32"
    transport: str = "shm"
    prefill_devices: str | None = None
    decode_devices: str | None = None
    prompt_file: Path | None = None
    json: bool = False
    verify: bool = True
    pull: bool = False
    intent: bool = False
    spans: bool = False
    pools: str = "own"
    max_new: int = 48
    page_size: int = 16
    part: int | None = None
    costs: Path | None = None
    pages: int = 160
    tcp: bool = False
    namespaces: bool = False
    attach: Path | None = None
    trouble: str | None = None
    down: float | None = None


def parse(argv: list[str] | None) -> DemoOptions:
    """Options from the command line."""
    parser = argparse.ArgumentParser(
        prog="make demo", description="Hand over target and draft KV of real text, and prove it."
    )
    add = parser.add_argument
    add("--prefill-tp", type=int, default=2, help="ranks of the prefill engine (default 2)")
    add("--decode-tp", type=int, default=1, help="ranks of the decode engine (default 1)")
    for role in ("prefill", "decode"):
        add(
            f"--{role}-framework",
            choices=FRAMEWORKS,
            default="torch",
            help=f"what {role} computes with (default torch)",
        )
        add_stages(parser, f"{role}-")
    add("--prefill-cp", type=int, default=1, help="context-parallel ranks of prefill, for each TP rank (default 1)")
    add("--prefill-interleave", type=int, default=16, help="consecutive tokens of one of them (default 16)")
    add("--prefill-deal", default="cyclic", metavar="NAME|R,R,...", help=DEAL)
    add("--prefill-dp", type=int, default=1, help="data-parallel replicas of the prefill engine (default 1)")
    add("--decode-dp", type=int, default=1, help="data-parallel replicas of the decode engine (default 1)")
    add_dcp(parser)
    add_back_end(parser)
    add_captured(parser)
    add_models(parser)
    add("--transport", default="shm", metavar="NAME", help=TRANSPORT_HELP)
    gpus = "GPUs of its ranks in turn, with --transport cuda (default: {} half of all) or nixl (default: the host)"
    add("--prefill-devices", metavar="N,N,...", help=gpus.format("the first"))
    add("--decode-devices", metavar="N,N,...", help=gpus.format("the second"))
    add("--prompt-file", type=Path, help="prompts separated by blank lines")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--no-verify", dest="verify", action="store_false", help="do not use feature VERIFY")
    add("--pools", choices=POOLS, default="own", help="who allocates them: kvproto, or JAX, with --transport cuda")
    add("--pull", action="store_true", help="decode reads what prefill offers (draft feature PULL)")
    add("--intent", action="store_true", help="decode claims pages when prefill is over (draft feature INTENT)")
    add("--spans", action="store_true", help="decode claims pages piece by piece while prefill runs (draft SPANS)")
    add("--max-new", type=int, default=48, help="tokens to generate for each prompt (default 48)")
    add("--page-size", type=int, default=16, help="tokens of a page (default 16)")
    add("--pages", type=int, default=160, help="pages of each pool (default 160)")
    add("--part", type=int, help="bytes that prefill sends at least while it computes (default 16 MiB)")
    add("--costs", type=Path, metavar="FILE", help="of `kvproto probe`: which runs are long, for cuda and nixl")
    add("--tcp", action="store_true", help="sessions over loopback TCP, encrypted by CURVE, instead of ipc")
    add("--namespaces", action="store_true", help="as --tcp, each engine in a network namespace of its own (root)")
    add("--attach", type=Path, metavar="DIR", help="use engines that run already with --dir DIR")
    for kind in KINDS:
        text = f"have prefill {kind.says} in the middle of its work" + (", and started again" if kind.ends else "")
        add(f"--{kind.name}", dest="trouble", action="store_const", const=kind.name, help=text)
    add("--down", type=float, metavar="SECONDS", help="how long it is away then (default 0; of --pause 12)")
    return DemoOptions(**vars(parser.parse_args(argv)))


def run(options: DemoOptions, console: Console) -> int:
    """Run the whole demo; returns the exit status."""
    if min(options.max_new, options.page_size, options.prefill_dp, options.decode_dp) < 1:
        raise EngineError("--max-new, --page-size, --prefill-dp and --decode-dp must be at least 1")
    torch.set_num_threads(1)
    tokenizer = shared_tokenizer(*_checkpoints(options))
    prompts = (
        read_prompts(options.prompt_file, tokenizer)
        if options.prompt_file
        else default_prompts(options.page_size, tokenizer)
    )
    if options.trouble and options.attach:
        raise EngineError(
            "--kill, --drain, --sleep and --pause are for engines that the demo starts: leave --attach out"
        )
    notes = Notes(None if options.json else console)
    with contextlib.ExitStack() as stack:
        folder = options.attach or stack.enter_context(_folder())
        outside = stack.enter_context(contextlib.ExitStack())  # ends after the engines
        engines = stack.enter_context(Engines(fork=options.transport != "cuda"))
        if options.attach is None:
            _start(engines, options, folder, outside)
        router = Router(folder, "prefill", engines, options.prefill_dp, options.decode_dp, notes.add)
        stack.callback(router.close)
        with console.status("starting a prefill and a decode engine") if not options.json else contextlib.nullcontext():
            if options.attach is None:
                router.wait_ready(LOAD, LOAD)
            else:
                router.wait_ready(START)
        trouble, late = None, 0
        if options.trouble:
            kind = next(kind for kind in KINDS if kind.name == options.trouble)
            late = len(prompts) // 2 if kind.later else 0
            down = kind.seconds if options.down is None else options.down
            rest = partial(router.submit, prompts[len(prompts) - late :], options.max_new)
            trouble = Trouble(kind, engines, router, notes.add, down, rest)
        router.submit(prompts[: len(prompts) - late], options.max_new)
        with _stream(router, tokenizer, console, options.json) as on_news:
            router.collect(on_news, trouble.turn if trouble else lambda: True)
        if options.attach is None:
            router.stop()
        with console.status("the same in one undivided engine") if not options.json else contextlib.nullcontext():
            compared = _compare(router, options)
    verdicts = verdict(router, compared, options.verify)
    if trouble is not None:
        verdicts[trouble.kind.name] = trouble.verdict
    if options.json:
        print(json.dumps(as_json(router, compared, verdicts, tokenizer, notes)))
    else:
        show(console, router, compared, verdicts, options.verify)
    return 0 if all(verdicts.values()) else 1


def _checkpoints(options: DemoOptions) -> tuple[Path, Path]:
    return checkpoint_folder("target", options.target), checkpoint_folder("draft", options.draft)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvproto-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(engines: Engines, options: DemoOptions, folder: Path, outside: contextlib.ExitStack) -> None:
    shared = ["--dir", str(folder), "--target", options.target, "--draft", options.draft, "--dtype", options.dtype,
              "--pages", str(options.pages), "--page-size", str(options.page_size),
              "--transport", options.transport, "--back-end", options.back_end]  # fmt: skip
    shared += [] if options.verify else ["--no-verify"]
    shared += ["--pull"] if options.pull else []
    shared += ["--pools", options.pools]
    shared += ["--costs", str(options.costs)] if options.costs else []
    here, there = (["--devices", d] if d else [] for d in _devices(options))
    part = 1 if options.trouble and options.part is None else options.part  # so that copies are under way throughout
    here += [] if part is None else ["--part", str(part)]
    here += ["--chunk", "16"] if options.trouble else []
    here += ["--tp", str(options.prefill_tp), "--cp", str(options.prefill_cp)]
    here += ["--interleave", str(options.prefill_interleave), "--deal", options.prefill_deal]
    here += ["--framework", options.prefill_framework]
    there += ["--intent"] * options.intent + ["--spans"] * options.spans
    there += ["--framework", options.decode_framework]
    there += ["--tp", str(options.decode_tp), "--dcp", str(options.dcp), "--interleave", str(options.interleave)]
    there += ["--deal", options.deal]
    there += ["--exchange", options.exchange, "--sources", str(options.prefill_dp), "--quiet"]
    there += ["--draft-sharded"] if options.draft_sharded else []
    there += ["--replicate-q"] if options.replicate_q else []
    there += ["--captured"] if options.captured else []
    places: dict[str, str] = {}
    if options.tcp or options.namespaces:
        address = free_address(options.prefill_dp, options.prefill_pp * options.prefill_cp * options.prefill_tp)
        if options.namespaces:
            places, address = outside.enter_context(namespaces())
        prefill_keys, decode_keys = key_folders(folder)
        shared += ["--prefill", address]
        here += ["--keys", str(prefill_keys)]
        there += ["--keys", str(decode_keys), "--source-key", str(prefill_keys / "public.key")]
    for role, main, own, replicas in (
        ("prefill", prefill.main, here, options.prefill_dp),
        ("decode", decode.main, there, options.decode_dp),
    ):
        given = {name: getattr(options, f"{role}_{name.replace('-', '_')}") for name in STAGES}
        own += [f"--{name}={number}" for name, number in given.items() if number is not None]
        for replica in range(replicas):
            engines.start(f"{role}-{replica}", main, [*shared, *own, "--replica", str(replica)], places.get(role))


def _devices(options: DemoOptions) -> tuple[str, str]:
    """GPUs of the prefill and the decode engine: those that were asked for, or half of all GPUs each."""
    if options.transport != "cuda":
        given = [d or "" for d in (options.prefill_devices, options.decode_devices)]
        return (given[0], given[1]) if options.transport == "nixl" else ("", "")
    count = torch.cuda.device_count()
    if not count:
        raise EngineError("--transport cuda needs a GPU")
    half = max(count // 2, 1)
    first, second = ",".join(map(str, range(half))), ",".join(map(str, range(half % max(count, 1), max(count, 1))))
    return options.prefill_devices or first, options.decode_devices or second


def _compare(router: Router, options: DemoOptions) -> list[Compared]:
    target, draft = _checkpoints(options)
    devices = numbers(_devices(options)[1])
    device = device_of(devices[0] if devices else None)
    engine = Undivided(
        target,
        draft,
        page_size=options.page_size,
        pages=options.pages,
        dtype=options.dtype,
        device=device,
        back_end=options.back_end,
    )
    found = []
    for request in router.requests:
        prompt: Prompt = request.prompt
        sampling = SamplingParams(temperature=prompt.temperature, seed=prompt.seed)
        try:
            result = engine.generate(prompt.tokens, sampling, options.max_new)
        except EngineError:
            # too long for one engine too; the pair has said so
            found.append(Compared(request, [], SpeculationStats()))
        else:
            lag = None
            if engine.rounds and sampling.greedy and request.tokens != result.tokens:
                lag = engine.lag(prompt.tokens, request.tokens)
            found.append(Compared(request, result.tokens, result.stats, engine.rounds, lag))
    return found


@contextlib.contextmanager
def _stream(
    router: Router, tokenizer: Tokenizer, console: Console, silent: bool
) -> Iterator[Callable[[Request], None]]:
    """Show continuations as they grow, or line by line where there is no terminal."""
    if silent:
        yield lambda request: None
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda request: live.update(_continuations(router, tokenizer), refresh=True)
    else:
        yield (
            lambda request: (
                console.print(f"{request.prompt.name}: {_text(request, tokenizer)}", highlight=False, markup=False)
                if request.over
                else None
            )
        )


def _continuations(router: Router, tokenizer: Tokenizer) -> Table:
    table = Table(title="continuations", title_justify="left", expand=True)
    table.add_column("prompt", no_wrap=True)
    table.add_column("ends with", ratio=1, no_wrap=True)
    table.add_column("continuation", ratio=2, no_wrap=True)
    for request in router.requests:
        ends = tokenizer.decode(request.prompt.tokens[-40:]).decode("utf-8", "replace")
        table.add_row(request.prompt.name, repr(ends)[1:-1], _text(request, tokenizer))
    return table


def _text(request: Request, tokenizer: Tokenizer) -> str:
    if request.error is not None:
        return f"failed: {request.error}"
    text = repr(tokenizer.decode(request.tokens).decode("utf-8", "replace"))[1:-1]
    return text + (" <end>" if request.tokens and request.tokens[-1] in tokenizer.eos else "")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    told = []

    def stop(number: int, _: object) -> None:
        # remembered too: an exception that is raised inside a callback of a library can be lost there
        told.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    options = parse(argv)
    try:
        status = run(options, Console(highlight=False))
        return 128 + told[0] if told else status
    except (EngineError, KvprotoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
