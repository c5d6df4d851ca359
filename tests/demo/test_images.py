"""Images: an encoder engine hands the rows that it makes over to prefill, and what it and prefill refuse."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvproto import new_ticket, write_ticket
from kvproto.transport import loading
from kvproto_reference.demo import encode, options
from kvproto_reference.demo.arguments import check
from kvproto_reference.demo.arguments import parse as parse_demo
from kvproto_reference.demo.control import Line
from kvproto_reference.demo.prompts import Prompt, image_prompts
from kvproto_reference.demo.rows import ImageRows
from kvproto_reference.engine.images import Image, expected
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.models import TensorParallel
from kvproto_reference.models.encoder import Encoder, EncoderConfig
from kvproto_reference.tokenizer import BYTES
from tests.demo.test_demo import FAULTY, demo, nothing_is_left_behind, report
from tests.processes import imported

__all__ = ["nothing_is_left_behind"]
imported("kvproto_reference.demo.__main__")

CONFIG = EncoderConfig(width=64)
RED, BLUE, TWO, _ = image_prompts(CONFIG, BYTES)
RUNS = {
    "TP 3 to TP 2, decode deals": ("--encoder-tp 3 --target gqa --decode-tp 2 --dcp 2 --pages 17", 3, 2),
    "TP 2 to CP 2 of TP 2, in pieces": ("--encoder-tp 2 --prefill-cp 2 --prefill-interleave 4 --chunk 17", 2, 4),
}
"""Options, and the numbers of ranks of the encoder and of prefill."""


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_one_engine_that_encodes_prefills_and_decodes(name: str) -> None:
    args, encoders, prefills = RUNS[name]
    result = demo("--images", "--max-new", "12", *args.split(), "--json")
    assert result.status == 0, result.said
    told = report(result)
    assert told["verdicts"] == dict.fromkeys(("requests", "checksums", "tokens", "acceptance", "images"), True)
    sent = {(word["source"], word["sink"]): word["rows"] for word in told["rows"]}
    assert {source for source, _ in sent} == {*range(encoders)}
    rows = sum(p.tokens.count(0) for p in (RED, BLUE, TWO))
    assert [sum(n for (_, d), n in sent.items() if d == sink) for sink in range(prefills)] == [rows] * prefills


@contextmanager
def encoding(folder: Path, *args: str) -> Iterator[Line]:
    """An encoder engine of one rank in a thread, and the router's line to it."""
    process = encode.EncodeProcess(encode.parse(["--dir", str(folder), *args]), World())
    thread = threading.Thread(target=process.serve)
    thread.start()
    line = Line(folder, "encoder-0")
    try:
        assert heard(line) == {"op": "ready"}
        yield line
    finally:
        line.send("stop")
        thread.join(10)
        line.close()
        assert not thread.is_alive()


def heard(line: Line) -> dict[str, Any]:
    """The next word of the encoder."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        line.socket.poll(10)
        if words := line.receive():
            return words[0]
    raise AssertionError("the encoder says nothing")


@contextmanager
def fetching(folder: Path, *args: str) -> Iterator[ImageRows]:
    """What fetches rows on a prefill of one rank."""
    rows = ImageRows(options.parse("prefill", ["--dir", str(folder), "--images", *args]), World())
    try:
        yield rows
    finally:
        rows.close("over")


def told(rows: ImageRows) -> dict[str, Any]:
    """The next word about rows at prefill."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        rows.lines.turn()
        if words := rows.hear():
            return words[0]
        time.sleep(0.001)
    raise AssertionError("nothing comes")


def ask(line: Line | None, rows: ImageRows, prompt: Prompt, shown: tuple[Image, ...]) -> dict[str, Any]:
    """Show the encoder images, have prefill fetch those of a prompt, and return what prefill hears."""
    ticket = new_ticket("encoder", deadline=5)
    digests = [image.digest.hex() for image in prompt.images]
    word = {"id": "a", "prompt": prompt.tokens, "ticket": write_ticket(ticket)}
    if line is not None:
        line.send("encode", **word, images=[image.to_word() for image in shown])
    sequence = TokenSequence(prompt=[*word["prompt"]], max_new=1, images=[*map(bytes.fromhex, digests)])
    rows.add("a", ticket, expected(sequence))
    assert not rows.begin()
    return told(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "engines"
    path.mkdir(mode=0o700)
    return path


def test_rows_arrive_as_the_encoder_makes_them(folder: Path) -> None:
    with encoding(folder) as line, fetching(folder) as rows:
        word = ask(line, rows, TWO, TWO.images)
        seen, lost = rows.arrived(0, word) or (None, word)
        assert lost is None
        assert seen is not None
        width = rows.pool.tensor.shape[-1]
        made = Encoder(EncoderConfig(width=width)).rows(image.pixels for image in TWO.images)
        assert made is not None
        assert torch.equal(seen, made)
        assert rows.pool.pages.available == len(rows.pool.tensor)


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(BLUE.images, id="another image of the same size"),
        pytest.param((Image(RED.images[0].pixels[:40]),), id="an image of another size"),
        pytest.param(RED.images * 2, id="two images for one"),
    ],
)
def test_an_image_that_is_not_the_prompts_is_refused(shown: tuple[Image, ...], folder: Path) -> None:
    with encoding(folder) as line, fetching(folder) as rows:
        word = ask(line, rows, RED, shown)
        assert word["code"] == "CONTENT_MISMATCH", word
        assert "prompt" in word["error"]
        rows.arrived(0, word)
        assert not rows.pending("a")


def test_an_image_that_is_not_made_of_patches_is_refused_by_the_encoder(folder: Path) -> None:
    with encoding(folder) as line:
        image = Image(np.zeros((20, 16, 3), np.uint8))
        line.send("encode", id="a", prompt=[0], ticket=write_ticket(new_ticket("encoder")), images=[image.to_word()])
        assert "scale it to multiples of 8" in heard(line)["error"]


@pytest.mark.usefixtures("faulty")
def test_a_flipped_bit_of_the_rows_is_noticed(folder: Path) -> None:
    with (
        encoding(folder, "--transport", "flips-target") as line,
        fetching(folder, "--transport", "flips-target") as rows,
    ):
        word = ask(line, rows, RED, RED.images)
        assert word["code"] == "VERIFY_FAILED", word
        assert "checksums[image rows]" in word["error"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package's transports are installed, which flip a bit of what they copy."""
    with monkeypatch.context() as patched:
        patched.syspath_prepend(FAULTY)
        loading._entries.cache_clear()
        yield
    loading._entries.cache_clear()
    loading.find.cache_clear()


def test_an_encoder_that_is_lost_fails_what_it_had_not_sent(folder: Path) -> None:
    with fetching(folder) as rows:
        with encoding(folder) as line:
            connect(rows)
            rows.add(
                "a", new_ticket("encoder"), expected(TokenSequence(prompt=RED.tokens, max_new=1, images=[bytes(32)]))
            )
            assert not rows.begin()
            line.send("stop")
            word = told(rows)
        assert word["code"] == "PEER_LOST", word
        assert "encoder" in word["error"]


def connect(rows: ImageRows) -> None:
    """Wait until the encoder answers."""
    end = time.monotonic() + 10
    while not next(iter(rows.sinks.values())).ready and time.monotonic() < end:
        time.sleep(0.001)


def test_an_encoder_with_other_weights_is_refused(folder: Path) -> None:
    with encoding(folder, "--seed", "1"), fetching(folder) as rows:
        word = told(rows)
        assert word["op"] == "misfit"
        assert "IDENTITY_MISMATCH at facts[weights.encoder]" in word["error"]
        assert "load the same model on both sides" in word["error"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--images --real", "leave --tiers, --real"),
        ("--images --dtype bfloat16", "leave --dtype out"),
        ("--images --prefill-framework jax", "--images is torch's"),
        ("--images --transport cuda", "choose --transport shm or inline"),
        ("--images --encoder-tp 0", "--encoder-tp must be at least 1"),
    ],
)
def test_options_of_the_demo_that_do_not_fit_are_one_sentence(args: str, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        check(parse_demo(args.split()))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--framework jax", "--images is torch's"),
        ("--host-pages 4", "not by images"),
        ("--transport cuda", "memory of the host"),
    ],
)
def test_options_of_prefill_that_do_not_fit_are_one_sentence(args: str, says: str, folder: Path) -> None:
    with pytest.raises(EngineError, match=says):
        options.parse("prefill", ["--dir", str(folder), "--images", *args.split()])


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(EngineError, match="too few for TP 5"):
        Encoder(CONFIG, TensorParallel(0, 5))
