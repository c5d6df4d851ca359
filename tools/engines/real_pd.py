"""A real model across engines, as a page to read: `ENGINE/python -m tools.engines.real_pd MODEL [--picture FILE]`.

MODEL is the folder that `make .venv/smollm2/config.json` writes. vLLM and SGLang each read chats for the other, and each answer is
compared with what the engine that wrote it says alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvproto_reference import checkpoint, smollm2
from kvproto_reference.chat import ChatTemplate
from kvproto_reference.demo.page import picture, short, text_of
from kvproto_reference.demo.prompts import Prompt, default_chats
from kvproto_reference.models import ModelConfig
from kvproto_reference.tokenizer import Tokenizer
from tools.engines import sglang_engine as sg
from tools.engines import vllm_engine as vl
from tools.engines.child import PATIENCE, Child, new_name
from tools.engines.cross_pd import Over, from_sglang, to_sglang

CHATS, MOST, FEW = 3, 20, 8
"""Of the demo's; tokens of an answer, and of one that goes wrong."""
VLLM: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 128 << 20,
    "enable_prefix_caching": False,
}
PREFILL: dict[str, Any] = {"page_size": 64, "chunked_prefill_size": 256}
DECODE: dict[str, Any] = {"page_size": 16}


@attrs.define
class Engines:
    """An engine with both roles, two with one role each, and one that hands nothing over."""

    vllm: vl.Engine
    prefill: sg.Engine
    decode: sg.Engine
    alone: sg.Engine
    names: tuple[str, str]

    @classmethod
    def of(cls, model: Path, folder: str) -> Engines:
        """Start them, without waiting."""
        import sglang
        import vllm

        given: dict[str, Any] = {"model_path": str(model)}

        def about(name: str) -> dict[str, Any]:
            options = {"transports": ["shm"], "feed": f"{folder}/{name}-{{role}}"}
            return {"options": options, "deadline": PATIENCE}

        source = {"sources": {"sglang:1": f"ipc://{folder}/sglang-0"}}
        first = vl.Engine.of("vllm", folder, [], "fail", extra=about("vllm") | source, model=str(model), **VLLM)
        first.start()
        return cls(
            first,
            sg.Engine.prefill("sglang", folder, **given, **PREFILL),
            sg.Engine.decode("sgl-d", folder, ["vllm"], about("sglang") | {"metadata": "request"}, **given, **DECODE),
            sg.Engine.start("alone", given | DECODE, {}),
            (f"vLLM {vllm.__version__}", f"SGLang {sglang.__version__}"),
        )

    def ready(self) -> None:
        for engine in self.each:
            engine.ready()

    @property
    def each(self) -> tuple[Child, ...]:
        return self.vllm, self.prefill, self.decode, self.alone

    def stop(self) -> None:
        self.vllm.stop()
        for engine in (self.prefill, self.decode, self.alone):
            engine.kill()


@attrs.define
class Way:
    """One engine reads, another writes.

    Fields:
        alone: What the engine that writes says by itself.
        bytes: That came to it, as its feed of events says.
        flipped: What it says to the first chat with one bit flipped.
    """

    reads: str
    writes: str
    answers: list[list[int]]
    alone: list[list[int]]
    bytes: int
    flipped: list[int] = attrs.Factory(list)

    def until(self, eos: frozenset[int]) -> Way:
        """The same, up to where the texts end."""

        def cut(tokens: list[int]) -> list[int]:
            ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
            return tokens[: min(ends, default=len(tokens))]

        answers, alone = ([cut(tokens) for tokens in some] for some in (self.answers, self.alone))
        return attrs.evolve(self, answers=answers, alone=alone, flipped=cut(self.flipped))


class Follower:
    """A follower of a Sink's events, as `kvproto tail --json` writes them down."""

    def __init__(self, feed: Path) -> None:
        self._file = Path(f"{feed}.json")
        with self._file.open("wb") as file:
            command = [sys.executable, "-m", "kvproto.cli.main", "tail", "--json", str(feed)]
            self._process = subprocess.Popen(command, stdout=file)
        self._lines({"metrics"}, 1)  # it follows

    def moved(self, count: int) -> int:
        """Bytes of so many fetches, once they are over."""
        return sum(line.get("bytes", 0) for line in self._lines({"arrived", "lost"}, count))

    def _lines(self, words: set[str], count: int) -> list[dict[str, Any]]:
        """The first so many of a kind; raises TimeoutError."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            *whole, _ = self._file.read_text().split("\n")
            found = [line for line in map(json.loads, whole) if words & {line["kind"], line.get("event")}]
            if len(found) >= count:
                return found[:count]
            time.sleep(0.05)
        raise TimeoutError(f"{self._file} has {len(found)} lines of {words}, not {count}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def both_ways(engines: Engines, chats: list[list[int]], folder: str) -> list[Way]:
    """SGLang reads and vLLM writes, then the other way round."""
    vllm, sglang = engines.names
    page, block, rows = PREFILL["page_size"], VLLM["block_size"], DECODE["page_size"]
    alone = {block: _alone(engines.vllm, chats), rows: _alone(engines.alone, chats)}
    routes: tuple[tuple[str, str, Over, Any, Any, int, str], ...] = (
        (f"{sglang}, pages of {page} tokens", f"{vllm}, blocks of {block}",
         from_sglang, engines.prefill, engines.vllm, block, "vllm"),
        (f"{vllm}, blocks of {block} tokens", f"{sglang}, pages of {rows}",
         to_sglang, engines.vllm, engines.decode, rows, "sglang"),
    )  # fmt: skip
    found = []
    for reads, writes, over, one, two, size, name in routes:
        follower = Follower(Path(folder) / f"{name}-sink")
        try:
            answers = [tokens for tokens, _ in over(one, two, chats, MOST)]
            moved = follower.moved(len(chats))
        finally:
            follower.close()
        found.append(Way(reads, writes, answers, alone[size], moved))
    for way, (_, _, over, one, two, *_) in zip(found, routes, strict=True):  # last, as it leaves NaN in pages
        ((way.flipped, _),) = over(one, two, chats[:1], FEW, corrupt="page")
    return found


def _alone(engine: Any, chats: list[list[int]]) -> list[list[int]]:
    names = [new_name() for _ in chats]
    for name, chat in zip(names, chats, strict=True):
        engine.add(name, chat, MOST)
    return [engine.result(name)[0] for name in names]


def show(console: Console, config: ModelConfig, chats: Sequence[Prompt], ways: list[Way], tokenizer: Tokenizer) -> bool:
    """Print the page; whether all went well."""
    lengths = [len(chat.tokens) for chat in chats]
    if console.record:
        console.export_text()  # a recording begins here
    console.print(f"\n[bold]{smollm2.NAME}[/bold], {config.layers} layers, {config.dtype}, on the CPU\n")
    drawn = Table.grid(padding=(0, 2))
    for way in ways:
        drawn.add_row(f"[bold]{way.reads}", f"reads {len(chats)} chats of {min(lengths)} to {max(lengths)} tokens")
        drawn.add_row("[cyan]      │", f"[cyan]{way.bytes:,} bytes of KV cache through shared memory")
        drawn.add_row("[cyan]      ▼")
        drawn.add_row(f"[bold]{way.writes}", f"writes {sum(map(len, way.answers))} tokens\n")
    console.print(drawn)
    answers = Table(expand=True, show_lines=True, border_style="dim")
    answers.add_column("asked", ratio=4)
    for way in ways:
        answers.add_column(f"{way.reads.split()[0]} read it, {way.writes.split()[0]} wrote", ratio=6)
    for chat, *each in zip(chats, *(way.answers for way in ways), strict=True):
        answers.add_row(Text(short(chat.said)), *(Text(text_of(tokens, tokenizer)) for tokens in each))
    console.print(answers)
    good = True
    for way in ways:
        name, count = way.writes.split(",")[0], sum(map(len, way.alone))
        equal = sum(
            one == two for a, b in zip(way.answers, way.alone, strict=True) for one, two in zip(a, b, strict=False)
        )
        right = way.answers == way.alone
        console.print(f"{_mark(right)} {equal} of {count} tokens are those that {name} writes alone")
        other = way.flipped[:FEW] != way.alone[0][:FEW]
        said = escape(text_of(way.flipped, tokenizer))
        console.print(
            f"{_mark(other)} one bit of one page flipped on its way, and {name} writes other tokens: {said!r}"
        )
        good &= right and other
    return good


def _mark(good: bool) -> str:
    return "[green]✓[/]" if good else "[red]✗[/]"


def main(argv: list[str]) -> int:
    """Print the page; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines.real_pd", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--picture", type=Path, help="write what is printed as a picture, SVG")
    args = parser.parse_args(argv)
    model = smollm2.folder(args.model)
    tokenizer, begun = checkpoint.load_tokenizer(model), time.monotonic()
    chats = default_chats(tokenizer, ChatTemplate(model))[:CHATS]
    console = Console(highlight=False, record=bool(args.picture), width=100)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        sg.plug_in(folder)
        engines = Engines.of(model, folder)
        try:
            engines.ready()
            ways = both_ways(engines, [chat.tokens for chat in chats], folder)
        finally:
            engines.stop()
    ways = [way.until(tokenizer.eos) for way in ways]
    good = show(console, checkpoint.load_config(model), chats, ways, tokenizer)
    if args.picture:
        picture(console, args.picture, "make engines")
    print(
        f"{'same   ' if good else 'DIFFERS'} {time.monotonic() - begun:5.0f} s  a real model across engines", flush=True
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
