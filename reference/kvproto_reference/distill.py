"""Training on a GPU: heads of SmolLM2 and of a small MLA model; python -m kvproto_reference.distill OUT.

A head has to agree with its own target, so the target writes the text: continuations of beginnings, some of them
greedy, some drawn. SmolLM2 also writes the text for the small MLA model, whose tokens are bytes. Beginnings are
docstrings of Python's standard library, and chats whose questions SmolLM2 makes up. Nothing else is read, and so no
text on which the heads are measured.
"""

import argparse
import ast
import json
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from . import checkpoint, smollm2
from .models import Attention, Decoder, Dense, Head, ModelConfig, Rows
from .models.head import head_of
from .presets import LARGE, LARGE_HEADS, HeadPreset, Preset
from .tokenizer import EOS, Tokenizer
from .train import build_optimizers, rate_factor
from .train_head import chosen, config_of, loss_of, untrained_head
from .weights import WEIGHTS_FILE, in_bytes

BEGUN = 24
"""Tokens of a beginning."""
DRAWN = 24
"""Tokens after a beginning that are always drawn at temperature 1, so that no two texts are alike."""
TEMPERATURES = (0.0, 0.6, 1.0)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)


SECONDS = {
    "smollm2": 80, "eagle-smollm2": 270, "mtp-smollm2": 170,
    "target-small": 70, "target-small texts": 12, "eagle-small": 32, "mtp-small": 32,
}  # fmt: skip
"""Seconds of writing or training for each of them, on one H100 or H200."""


WARM = 10, 40
"""Steps whose time says how many there are time for."""


class Kept(Attention):
    """Rows of a batch of sequences that all stand at one position, with room for `room` tokens each."""

    def __init__(self, config: ModelConfig, batch: int, room: int, device: torch.device) -> None:
        self.config, self._where = config, torch.arange(room, device=device)
        self.heads = config.kv_heads if config.kind == "gqa" else 1
        shape = config.layers, batch, room, self.heads, config.row_dim
        self._rows = {
            part: torch.zeros(shape, dtype=getattr(torch, config.dtype), device=device) for part in config.parts
        }
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        for part, new in rows.items():
            self._rows[part][layer].index_copy_(1, self.positions, new)
        kept = [held[layer].transpose(1, 2) for held in self._rows.values()]
        batch, n, heads, dim = q.shape
        group = heads // self.heads
        folded = q.transpose(1, 2).reshape(batch, self.heads, group * n, dim)  # no copies of keys for the group
        seen = (self._where <= self.positions[:, None]).repeat(group, 1)
        out = F.scaled_dot_product_attention(folded, kept[0], kept[-1], attn_mask=seen, scale=self.config.score_scale)
        return out.reshape(batch, heads, n, dim).transpose(1, 2)[..., : self.config.value_dim]


class Writer:
    """Continues beginnings with a model, a batch at a time; each step is a replayed CUDA graph on a GPU."""

    def __init__(
        self,
        model: Decoder,
        batch: int,
        length: int,
        device: torch.device,
        temperatures: Sequence[float] = TEMPERATURES,
    ) -> None:
        """Texts of `length` tokens, as many at each temperature; without any but 0, all of them are greedy."""
        self._model, self._length = model, length
        self._attention = Kept(model.config, batch, length, device)
        self._newest = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        share = torch.arange(batch, device=device) * len(temperatures) // batch
        self._heat = torch.tensor(temperatures, device=device)[share][:, None]
        self._warm = torch.zeros((), dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def write(self, begun: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, length]."""
        attention, said = self._attention, [begun]
        self._warm.fill_(begun.shape[1] + DRAWN if self._heat.any() else 0)
        attention.positions = torch.arange(begun.shape[1], device=begun.device)
        self._choose(self._model.forward(begun, attention.positions, attention)[:, -1])
        attention.positions = self._at
        for at in range(begun.shape[1], self._length):
            said.append(self._newest.clone())
            self._at.fill_(at)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
                if begun.is_cuda:
                    self._capture()
        return torch.cat(said, 1)

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):  # runs nothing
            self._step()

    def _step(self) -> None:
        self._choose(self._model.forward(self._newest, self._at, self._attention)[:, -1])

    def _choose(self, logits: Tensor) -> None:
        noise = -torch.empty_like(logits).exponential_().log()
        heat = torch.where(self._attention.positions[-1] < self._warm, 1.0, self._heat)
        self._newest.copy_((logits + heat * noise).argmax(-1, keepdim=True))


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library, each once."""
    seen: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & {*path.parts}:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        for text in (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)):
            if text and len(text) > 40 and text not in seen:
                seen.add(text)
                yield text


def beginnings(tokenizer: Tokenizer, texts: Iterable[str]) -> Tensor:
    """[beginnings, BEGUN] tokens of texts, cut anywhere."""
    each = (tokenizer.encode(text.encode()) for text in texts)
    return torch.tensor([ids[at : at + BEGUN] for ids in each for at in range(0, len(ids) - BEGUN + 1, BEGUN)])


def written(model: Decoder, begun: Callable[[int], Tensor], batch: int, length: int, seconds: float) -> Tensor:
    """Texts that a model writes in so many seconds [texts, length]; `begun(n)` is the nth batch of beginnings."""
    device = next(model.parameters()).device
    writer, found, until = Writer(model, batch, length, device), list[Tensor](), time.monotonic() + seconds
    while not found or time.monotonic() < until:
        found.append(writer.write(begun(len(found)).to(device)))
        if device.type == "cuda":
            torch.cuda.synchronize()
    print(f"  {len(found)} batches of {batch} texts, {len(found) * batch * length:,} tokens", flush=True)
    return torch.cat(found)


def fit(
    name: str, model: nn.Module, preset: Preset | HeadPreset, loss_on: Callable[[], Tensor], seconds: float
) -> None:
    """Train a model for so many seconds; the number of steps follows from the time of the first ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = build_optimizers(model, preset)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    begun, step, steps, losses, warm = time.monotonic(), 0, 10**9, list[Tensor](), 0.0
    while step < steps and time.monotonic() - begun < 1.05 * seconds:
        loss = loss_on()
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate_factor(step, steps)
            optimizer.step()
        losses.append(loss.detach())
        step += 1
        if step in WARM:
            losses[-1].item()  # waits for the GPU
            spent = time.monotonic() - begun
            if step == WARM[1]:
                steps = step + int((seconds - spent) * (WARM[1] - WARM[0]) / max(spent - warm, 1e-3))
            warm = spent
        if step % 500 == 0 or step == steps:
            mean = torch.stack(losses[-100:]).mean().item()
            print(f"  {name}: step {step} of {steps}, loss {mean:.3f}, {time.monotonic() - begun:.0f} s", flush=True)


def batches(texts: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Random texts [count, tokens], again and again."""
    random = torch.Generator().manual_seed(seed)
    while True:
        yield texts[torch.randint(len(texts), (count,), generator=random).to(texts.device)]


def as_bytes(texts: Tensor, tokenizer: Tokenizer, length: int) -> Tensor:
    """The texts' bytes, one after another, in windows [windows, length + 1]; EOS follows each text."""
    stream: list[int] = []
    for row in texts.tolist():
        ends = [i for i, token in enumerate(row) if token in tokenizer.eos]
        for lo, hi in zip([0, *(i + 1 for i in ends)], [*ends, len(row)], strict=True):
            stream += [*tokenizer.decode(row[lo:hi]), EOS]
    count = len(stream) // (length + 1)
    return torch.tensor(stream[: count * (length + 1)], dtype=torch.int16).reshape(count, length + 1)


@attrs.frozen(kw_only=True)
class Run:
    """The size of a run; the defaults are for a GPU with 80 GB and nine minutes."""

    device: torch.device
    batch: int = 1024
    length: int = 384
    windows: int = 48
    speed: float = 1.0
    """Factor of all times."""

    def seconds(self, count: float) -> float:
        """Seconds that a job of `count` seconds takes in this run."""
        return count * self.speed


def trained_head(run: Run, name: str, folder: Path, target: Decoder, texts: Tensor) -> Head:
    """Train a head of the target in a folder on texts of that target."""
    preset = LARGE_HEADS[name]
    torch.manual_seed(preset.seed)
    config = config_of(preset, folder, target.config)
    reads = attrs.evolve(head_of(config), vocab=min(preset.vocab, target.config.vocab))
    counts = torch.bincount(texts[:, BEGUN:].flatten(), minlength=target.config.vocab).tolist()
    made = untrained_head(attrs.evolve(config, head=reads), target, counts).to(run.device)
    some = batches(texts, run.windows, preset.seed)
    fit(name, made, preset, lambda: loss_of(made, target, next(some), preset.unrolled), run.seconds(SECONDS[name]))
    whole = Head(config)
    if whole.whole:  # it was trained on the most frequent tokens alone, and says all
        whole.load_state_dict({name: w for name, w in made.state_dict().items() if name != "d2t"})
    return whole if whole.whole else made


def measured(made: Head, target: Decoder, texts: Tensor, begun: int, most: int = 4) -> float:
    """Tokens a step of greedy decode, of texts that the target chose from token `begun` on, with so many proposals."""
    with torch.no_grad():
        found = [chosen(made, target, some, most)[:, begun:].float() for some in torch.split(texts, 8)]
    return 1 + torch.cat(found).mean().item()


def small_mla(run: Run, texts: Tensor, tokenizer: Tokenizer) -> Decoder:
    """Train the small MLA model on the bytes of texts."""
    preset = LARGE["target-small"]
    torch.manual_seed(preset.seed)
    model = Decoder(preset.config).to(run.device)
    windows = as_bytes(texts, tokenizer, 512).to(run.device)
    print(f"  {windows.numel():,} bytes", flush=True)
    some, dense = batches(windows, run.windows * 2, preset.seed), Dense(preset.config)
    positions = torch.arange(512, device=run.device)

    def loss() -> Tensor:
        batch = next(some).long()
        return F.cross_entropy(model.forward(batch[:, :-1], positions, dense).flatten(0, 1), batch[:, 1:].flatten())

    fit("target-small", model, preset, loss, run.seconds(SECONDS["target-small"]))
    return model


def save(folder: Path, model: Decoder | Head) -> None:
    """Round the weights, matrices to 8 bits per element and vectors to bfloat16, and write them so."""
    checkpoint.save(folder, model)
    weights: dict[str, Tensor] = {}
    for name, w in load_file(folder / WEIGHTS_FILE).items():
        small = w.bfloat16() if w.is_floating_point() else w
        weights |= in_bytes(name, w) if w.is_floating_point() and w.ndim > 1 else {name: small}
    (folder / WEIGHTS_FILE).write_bytes(to_bytes(weights))


def greedy(target: Decoder, prompts: Tensor, length: int) -> Tensor:
    """Prompts [prompts, tokens] with the answers of the target [prompts, length]."""
    return Writer(target, len(prompts), length, prompts.device, (0.0,)).write(prompts)


class Studio:
    """SmolLM2, its texts, and the models that are trained on them, in a folder of checkpoint folders."""

    def __init__(self, run: Run, folder: Path, out: Path, unseen: bytes) -> None:
        self._run, self._folder, self._out, self._unseen = run, folder, out, unseen
        self._tokenizer = checkpoint.load_tokenizer(folder)
        dtype = "bfloat16" if run.device.type == "cuda" else "float32"
        self._target = checkpoint.load(folder, dtype=dtype, device=run.device)
        begun = beginnings(self._tokenizer, docstrings())
        begun = begun[torch.randperm(len(begun), generator=torch.Generator().manual_seed(3))]
        chat = torch.tensor(self._tokenizer.encode(CHAT.encode())).expand(run.batch, -1)
        print(f"{len(begun)} beginnings", flush=True)

        def texts_from(n: int) -> Tensor:
            return chat if n % 2 else _some(begun, n // 2, run.batch)

        self._texts = written(self._target, texts_from, run.batch, run.length, run.seconds(SECONDS["smollm2"]))
        self.found: dict[str, float] = {}
        """Tokens a step with each head, on text outside of its training."""

    def smollm2(self) -> None:
        """Train the heads of SmolLM2."""
        self._heads(("eagle-smollm2", "mtp-smollm2"), self._folder, self._target, self._texts, 64)

    def small(self) -> None:
        """Train the small MLA model and its heads."""
        run, folder = self._run, self._out / "target-small"
        save(folder, small_mla(run, self._texts, self._tokenizer))
        target = checkpoint.load(folder, device=run.device)
        pieces = as_bytes(self._texts[:4000], self._tokenizer, 63)
        pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(4))].long()
        seconds = run.seconds(SECONDS["target-small texts"])
        texts = written(target, lambda n: _some(pieces, n, run.batch), run.batch, run.length + 128, seconds)
        self._heads(("eagle-small", "mtp-small"), folder, target, texts, 192)

    def _heads(self, names: Sequence[str], folder: Path, target: Decoder, texts: Tensor, begun: int) -> None:
        encode = checkpoint.load_tokenizer(folder).encode
        ids, asked = encode(self._unseen), None
        if ids:
            starts = range(0, len(ids) - begun, max(len(ids) // 40, 1))
            prompts = torch.tensor([ids[at : at + begun] for at in starts]).to(self._run.device)
            asked = greedy(target, prompts, begun + self._run.length // 4)
        for name in names:
            save(self._out / name, trained_head(self._run, name, folder, target, texts))
            if asked is not None:
                made = checkpoint.load_head(self._out / name, folder, device=self._run.device)
                self.found[name] = measured(made, target, asked, begun)
                print(name, self.found[name], flush=True)


def _some(texts: Tensor, n: int, count: int) -> Tensor:
    """The nth `count` of texts, again and again."""
    return texts[(torch.arange(count) + n * count) % len(texts)]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the checkpoint folders")
    parser.add_argument("--smollm2", type=Path, default=smollm2.FOLDER, help="its checkpoint folder")
    parser.add_argument("--only", choices=["smollm2", "small"], help="train only the heads of one target")
    parser.add_argument("--measure", type=Path, help="a text outside of the training, to measure heads on")
    parser.add_argument("--speed", type=float, default=1.0, help="factor of all times")
    parser.add_argument("--tiny", action="store_true", help="small batches, for a CPU")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    run = Run(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"), speed=args.speed)
    if args.tiny:
        run = attrs.evolve(run, batch=3, length=48, windows=2)
    unseen = args.measure.read_bytes() if args.measure else b""
    studio = Studio(run, smollm2.folder(args.smollm2), args.out, unseen)
    for name in ("smollm2", "small"):
        if args.only in (None, name):
            getattr(studio, name)()
    (args.out / "measured.json").write_text(json.dumps(studio.found, indent=2) + "\n")


if __name__ == "__main__":
    main()
