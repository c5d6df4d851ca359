"""`make demo`: runs a prefill engine, a decode engine and a router, and compares them with one undivided engine."""

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

from .. import checkpoint, smollm2
from ..adapters import adapters_of
from ..cache.memory import device_of
from ..chat import ChatTemplate
from ..engine.sequence import SpeculationStats, rows_needed
from ..engine.undivided import Undivided
from ..errors import EngineError
from ..models.encoder import Encoder, EncoderConfig
from ..tokenizer import Tokenizer
from . import tiers
from .arguments import DemoOptions, check, parse
from .clock import Clock
from .engines import Engines
from .options import checkpoint_folder, draft_folder, numbers
from .page import picture, show_page
from .prompts import Prompt, default_chats, default_prompts, image_prompts, read_prompts
from .report import Compared, Notes, as_json, other_adapters, other_tokens, show, verdict
from .router import LOAD, START, Request, Router
from .start import devices, start
from .trouble import KINDS, Trouble


def run(options: DemoOptions, console: Console) -> int:
    """Run the whole demo; returns the exit status."""
    check(options)
    if options.real:
        smollm2.folder()
    torch.set_num_threads(1)
    if options.tiers:
        shown = None if options.json else console
        sizes = options.page_size, options.max_new, options.chunk, options.speculate
        return tiers.run(_checkpoints(options), *sizes, shown, options)
    tokenizer = checkpoint.shared_tokenizer(*_checkpoints(options))
    prompts = _with_adapters(_sampled(_prompts(options, tokenizer), options), options)
    notes = Notes(None if options.json else console)
    clock = Clock(None if options.json else console)
    with contextlib.ExitStack() as stack:
        folder = options.attach or stack.enter_context(_folder())
        outside = stack.enter_context(contextlib.ExitStack())  # ends after the engines
        engines = stack.enter_context(Engines(fork=options.transport != "cuda"))
        if options.attach is None:
            start(engines, options, folder, outside)
        replicas = options.prefill_dp, options.decode_dp
        router = Router(folder, "prefill", engines, *replicas, notes.add, options.images)
        stack.callback(router.close)
        engines_here = "an encoder, a prefill" if options.images else "a prefill"
        with clock.stage("start", f"starting {engines_here} and a decode engine"):
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
            again = partial(router.submit, prompts, options.max_new)
            trouble = Trouble(kind, engines, router, notes.add, down, rest, again)
        with clock.stage("pair"):
            router.submit(prompts[: len(prompts) - late], options.max_new)
            with _stream(router, tokenizer, console, options) as on_news:
                router.collect(on_news, trouble.turn if trouble else lambda: True)
            if options.attach is None:
                router.stop()
        with clock.stage("one engine", "the same in one undivided engine"):
            compared = _compare(router, options)
    verdicts = verdict(router, compared, options.verify)
    if options.images:
        verdicts["images"] = other_tokens(router)
    if options.adapter:
        verdicts["adapters"] = other_adapters(router)
    if trouble is not None:
        verdicts[trouble.kind.name] = trouble.verdict
    if options.json:
        print(json.dumps(as_json(router, compared, verdicts, tokenizer, notes)))
    elif options.overview:
        show_page(console, options, router, compared, verdicts, tokenizer, clock.seconds)
    else:
        show(console, router, compared, verdicts, options.verify, options.cold_draft == "zero")
    return 0 if all(verdicts.values()) else 1


def _prompts(options: DemoOptions, tokenizer: Tokenizer) -> list[Prompt]:
    if options.images:
        return image_prompts(_encoder(options), tokenizer)
    template = ChatTemplate(_checkpoints(options)[0]) if options.chat else None
    if options.prompt_file:
        return read_prompts(options.prompt_file, tokenizer, template)
    return default_chats(tokenizer, template) if template else default_prompts(options.page_size, tokenizer)


def _encoder(options: DemoOptions) -> EncoderConfig:
    """The encoder that prefill expects."""
    return EncoderConfig(width=checkpoint.load_config(_checkpoints(options)[0], options.dtype).hidden)


def _sampled(prompts: list[Prompt], options: DemoOptions) -> list[Prompt]:
    """The prompts with the sampling of the command line, if it has any."""
    return [attrs.evolve(p, sampling=options.sampling) for p in prompts] if options.sampling else prompts


def _with_adapters(prompts: list[Prompt], options: DemoOptions) -> list[Prompt]:
    """The prompts, and again with each adapter of the command line."""
    names = [name for name, _ in options.adapter]
    return prompts + [attrs.evolve(p, name=f"{p.name}, {name}", adapter=name) for p in prompts for name in names]


def _checkpoints(options: DemoOptions) -> tuple[Path, ...]:
    """Checkpoints of the target, and of the draft if there is one."""
    draft = draft_folder(options.draft, options.speculate, options.target)
    return (checkpoint_folder("target", options.target), *([] if draft is None else [draft]))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvproto-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(router: Router, options: DemoOptions) -> list[Compared]:
    """Compare each request with one undivided engine, which serves all of them in one batch."""
    served = [request for request in router.requests if request.error is None]
    rows = sum(rows_needed(len(r.prompt.tokens), r.max_new) + options.page_size for r in served)
    gpus = numbers(devices(options)[1])
    engine = Undivided(
        *_checkpoints(options),
        page_size=options.page_size,
        pages=1 + rows // options.page_size,
        chunk=options.chunk,
        k=options.speculate,
        dtype=options.dtype,
        device=device_of(gpus[0] if gpus else None),
        back_end=options.back_end,
        cold=options.cold_draft == "zero",
        adapters=adapters_of(dict(options.adapter)),
        prefill_form=options.prefill_kv_dtype,
        decode_form=options.decode_kv_dtype,
    )
    asked = [(r.prompt.tokens, r.prompt.sampling) for r in served]
    encoder = Encoder(_encoder(options)) if options.images else None
    seen = [encoder.rows(image.pixels for image in r.prompt.images) if encoder else None for r in served]
    adapters = [request.prompt.adapter for request in served]
    results = dict(zip(served, engine.generate_all(asked, options.max_new, seen, adapters), strict=True))
    found = []
    for request in router.requests:
        result, lag = results.get(request), None
        if result is None:
            found.append(Compared(request, [], SpeculationStats()))
            continue
        if engine.rounds and request.prompt.sampling.plain and request.tokens != result.tokens:
            lag = engine.lag(request.prompt.tokens, request.tokens, request.prompt.adapter)
        found.append(Compared(request, result.tokens, result.stats, engine.rounds, lag, result.logprobs))
    return found


@contextlib.contextmanager
def _stream(
    router: Router, tokenizer: Tokenizer, console: Console, options: DemoOptions
) -> Iterator[Callable[[Request], None]]:
    """Show continuations as they grow, or line by line where there is no terminal."""
    if options.json:
        yield lambda request: None
    elif options.overview and not console.is_terminal:
        ended = {True: "is answered", False: "failed"}
        yield lambda r: console.print(f"{r.prompt.name} {ended[r.error is None]}") if r.over else None
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=options.overview) as live:
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
        # remembered as well, since a library may swallow an exception that is raised inside one of its callbacks
        told.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    options = parse(argv)
    console = Console(highlight=False, record=bool(options.picture), width=100 if options.picture else None)
    try:
        status = run(options, console)
        if options.picture is not None:
            picture(console, options.picture)
        return 128 + told[0] if told else status
    except (EngineError, KvprotoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
