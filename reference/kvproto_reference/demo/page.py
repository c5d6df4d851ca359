"""The page that the demo prints of a real model, for people who have not seen kvproto before."""

import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import smollm2
from ..checkpoint import load_config
from ..errors import EngineError
from ..models import ModelConfig
from ..tokenizer import Tokenizer
from .arguments import DemoOptions
from .options import checkpoint_folder, draft_folder
from .report import NOTHING, Compared, matrix, words_of
from .router import Request, Router


def show_page(
    console: Console,
    options: DemoOptions,
    router: Router,
    compared: list[Compared],
    verdicts: dict[str, bool],
    tokenizer: Tokenizer,
    seconds: dict[str, float],
) -> None:
    """Print who computed what, where the caches went, the answers, the proof and the `seconds` of each stage.

    A picture leaves all times out, since they hold for one machine on one day.
    """
    folder = checkpoint_folder("target", options.target)
    beside = draft_folder(options.draft, options.speculate, options.target)
    target = load_config(folder, options.dtype)
    name = smollm2.NAME if options.real else folder.name
    draft = "no draft" if beside is None else _draft(load_config(beside, options.dtype))
    if console.record:
        console.export_text()  # a recording begins here
    console.print(f"\n[bold]{escape(name)}[/bold], {target.layers} layers, {target.dtype}; {draft}\n")
    console.print(_engines(options, router, compared))
    console.print(_answers(compared, tokenizer))
    for line in _proof(compared, verdicts, options.verify, options.cold_draft == "zero"):
        console.print(line)
    if options.picture:
        return
    spent = ", ".join(f"{what} {many:.1f}" for what, many in seconds.items())
    console.print(f"[dim]{sum(seconds.values()):.0f} s in all: {spent}[/dim]")


def _draft(config: ModelConfig) -> str:
    forms = {"eagle3": "an EAGLE-3 head drafts", "mtp": "an MTP layer drafts"}
    return forms[config.head.form] if config.head is not None else f"draft of {config.layers} layers"


_SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's template of an SVG file, without the fonts that it would load from the network."""


def picture(console: Console, path: Path, title: str = "make demo") -> None:
    """Write what a recording console has printed as SVG; raises EngineError if the file cannot be written."""
    try:
        console.save_svg(str(path), title=title, code_format=_SVG, unique_id="kvproto")
    except OSError as error:
        raise EngineError(f"--picture {path} cannot be written: {error.strerror}") from error


def _engines(options: DemoOptions, router: Router, compared: list[Compared]) -> Table:
    """The two engines, with what was copied between them."""
    served = [c.request for c in compared if c.request.error is None]
    read = sum(len(r.prompt.tokens) for r in served)
    wrote = sum(len(r.tokens) - 1 for r in served)
    moved = matrix(router)
    total, copies = sum(moved.values()), sum(word["seconds"] for word in router.sent)
    times = [_lasted(served, "asked", "arrived"), f", copied in {1000 * copies:.0f} ms"]
    times += [_lasted(served, "arrived", "finished", wrote)]
    if options.picture:
        times = [""] * 3
    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]prefill engine", f"[bold]{_shape(options, 'prefill')}")
    table.add_row("", f"read {read:,} tokens of {len(served)} prompts{times[0]}")
    for source, sink in sorted({(s, d) for s, d, _ in moved}):
        groups = {g: n for (s, d, g), n in moved.items() if (s, d) == (source, sink)}
        each = ", ".join(f"{g} {n / 1e6:.1f} MB" for g, n in groups.items() if n)
        names = (f"{f'replica {replica} ' * router.several}rank {rank}" for replica, rank in (source, sink))
        table.add_row("[cyan]      │", f"[cyan]{' to '.join(names)}: {each}")
    table.add_row("[cyan]      ▼", f"[cyan]{total:,} bytes of KV cache by {options.transport}{times[1]}")
    table.add_row("[bold]decode engine", f"[bold]{_shape(options, 'decode')}")
    table.add_row("", f"wrote {wrote:,} tokens{times[2]}")
    return table


def _shape(options: DemoOptions, role: str) -> str:
    framework, tp, pp, dp = (getattr(options, f"{role}_{name}") for name in ("framework", "tp", "pp", "dp"))
    ranks = tp * pp * (options.prefill_cp if role == "prefill" else 1)
    processes = 1 if framework == "jax" else ranks * (dp if options.dp_attention else 1)
    sizes = [f"TP {tp}", f"pages of {options.page_size_of(role)} tokens"]
    replicas = f"{dp} replicas" + " that share experts" * options.dp_attention
    sizes[:0] = [replicas] * (dp > 1) + [f"{framework}, {processes} process{'es' * (processes > 1)}"]
    return ", ".join(sizes)


def _lasted(requests: list[Request], begin: str, end: str, tokens: int = 0) -> str:
    """The time from the first `begin` to the last `end`, with the rate of `tokens` if there are any."""
    if not requests:
        return ""
    seconds = max(r.at[end] for r in requests) - min(r.at[begin] for r in requests)
    return f" in {seconds:.1f} s" + (f", {tokens / seconds:.0f} a second" if tokens else "")


def _answers(compared: list[Compared], tokenizer: Tokenizer) -> Table:
    table = Table(expand=True, show_lines=True, border_style="dim")
    table.add_column("asked", ratio=4)
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("answered", ratio=9)
    table.add_column("one engine\nsays", justify="right")
    for c in compared:
        r = c.request
        answer = Text(text_of(r.tokens, tokenizer)) if r.error is None else Text(r.error, style="red")
        same = (
            "[green]the same"
            if c.same_tokens
            else "[yellow]as likely"
            if c.agrees
            else "[red]" + escape(_differs(c, tokenizer))
        )
        table.add_row(Text(short(r.prompt.said or r.prompt.name)), str(len(r.prompt.tokens)), answer, same)
    return table


def short(said: str, most: int = 90) -> str:
    """The text, cut to whole words of both ends if it is longer than `most` characters."""
    words = " ".join(said.split())
    if len(words) <= most:
        return words
    return f"{words[: most // 2].rpartition(' ')[0]} ... {words[-most // 2 :].partition(' ')[2]}"


def text_of(tokens: list[int], tokenizer: Tokenizer) -> str:
    """The text of an answer, with "..." if it was cut off."""
    ended = bool(tokens) and tokens[-1] in tokenizer.eos
    return tokenizer.decode(tokens).decode("utf-8", "replace").strip() + ("" if ended else " ...")


def _differs(c: Compared, tokenizer: Tokenizer) -> str:
    """The text at which the pair's tokens first differ from those of one engine."""
    if c.request.error is not None:
        return "no answer"
    pairs = zip(c.request.tokens, c.tokens, strict=False)
    at = next((i for i, (mine, one) in enumerate(pairs) if mine != one), min(len(c.request.tokens), len(c.tokens)))
    return f"{text_of(c.tokens[at : at + 4], tokenizer)} from token {at} on"


def _a_step(compared: list[Compared]) -> str:
    found = [c.request.stats for c in compared if c.request.stats]
    return f"{sum(stats['decoded'] for stats in found) / max(sum(stats['steps'] for stats in found), 1):.2f}"


def _proof(compared: list[Compared], verdicts: dict[str, bool], verify: bool, cold: bool) -> list[str]:
    """A line for each verdict, and one for all of them; `cold`: one engine's draft began with zero rows too."""
    often = "as often as by one engine with a cold draft" if cold else "as often"
    count = sum(len(c.tokens) for c in compared)
    equal = sum(m == o for c in compared for m, o in zip(c.request.tokens, c.tokens, strict=False))
    sums, due = sum(c.checksums for c in compared), sum(c.due for c in compared)
    says = {
        "requests": f"{sum(c.request.error is None for c in compared)} of {len(compared)} prompts were answered",
        "tokens": f"{equal:,} of {count:,} tokens are those that one undivided engine writes",
        "checksums": f"{sums} of {due} checksums of what arrived equal those of what was sent",
        "acceptance": f"the draft's proposals were accepted {often}: {_a_step(compared)} tokens a step",
    }
    lines = []
    for name, good in verdicts.items():
        if name != "checksums" or verify:
            told = words_of(name, good, compared)
            sentence = f"{name}: {told}" if told == NOTHING or name not in says else says[name]
            lines.append(f"{'[green]✓' if good else '[red]✗'}[/] {sentence}")
    good = all(verdicts.values())
    return [*lines, "[bold green]nothing was lost" if good else "[bold red]NOT as one undivided engine"]
