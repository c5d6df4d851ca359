"""Checkpoint folders: our own (config.json, model.safetensors) and Hugging Face's, which have a `model_type`."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import attrs
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from .errors import EngineError
from .models import SOLO, Decoder, Head, ModelConfig, TensorParallel, cut, head_among
from .models.config import json_object
from .models.hf import eos_ids, ignored, source, translate
from .tokenizer import BYTES, Tokenizer, check_agreement
from .weights import WEIGHTS_FILE, Weights, identity

CHECKPOINTS = Path(__file__).parent / "checkpoints"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
EMBED = "embed"


def save(folder: Path, model: Decoder | Head) -> None:
    """Write a full (TP 1) model to a folder, which is created if missing; raises EngineError for a part of a model.

    A head is written without its embedding, which is the target's.
    """
    if model.tp.size != 1:
        raise EngineError("only a full (TP 1) model can be saved")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(model.config.to_json())
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    if isinstance(model, Head):  # its target has it
        del weights[EMBED]
    # Not save_file, whose files only the owner may read, so that an installed package could not use them.
    (folder / WEIGHTS_FILE).write_bytes(to_bytes(weights))


def is_hf(folder: Path) -> bool:
    """Whether a checkpoint folder is Hugging Face's."""
    return "model_type" in _fields(folder)


def load_config(folder: Path, dtype: str = "float32") -> ModelConfig:
    """Sizes of the model in a checkpoint folder; `dtype` "auto" is the one that its config names."""
    fields = _fields(folder)
    if "model_type" in fields:
        return translate(fields, dtype)
    config = ModelConfig.from_fields(fields)
    return config if dtype == "auto" else attrs.evolve(config, dtype=dtype)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder, with the tokens that end a text; bytes for our own checkpoints."""
    if not is_hf(folder):
        return BYTES
    from .hf_tokenizer import HfTokenizer  # asks for a package that our own checkpoints do without

    generation = folder / GENERATION_FILE
    eos = eos_ids(_fields(folder), json_object(generation.read_text()) if generation.is_file() else {})
    return HfTokenizer(_require(folder, TOKENIZER_FILE), eos, load_config(folder).vocab)


def shared_tokenizer(target: Path, *drafts: Path) -> Tokenizer:
    """The target's tokenizer; raises EngineError where a draft has another vocabulary, naming both.

    A head has its target's.
    """
    tokenizer = load_tokenizer(target)
    for draft in drafts:
        if load_config(draft).head is None:
            check_agreement(tokenizer, load_tokenizer(draft))
    return tokenizer


def load(
    folder: Path, tp: TensorParallel = SOLO, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Decoder:
    """This TP rank's part of the model in a checkpoint folder, ready for inference; raises EngineError for a head."""
    config = load_config(folder, dtype)
    if config.head is not None:
        raise EngineError(f"{folder} is a head, which runs beside its target: give it as the draft")
    with torch.device("meta"):
        model = Decoder(config, tp)
    model.load_state_dict(state(folder, tp, dtype=dtype, device=device), assign=True)
    model.to(device).eval().requires_grad_(False).join()
    return model


def load_head(
    folder: Path, target: Path, tp: TensorParallel = SOLO, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Head:
    """The same of a head, with the embedding of the target in a folder.

    Raises EngineError for another model, and for a `d2t` that does not fit.
    """
    config = load_config(folder, dtype)
    with torch.device("meta"):
        head = Head(config, tp)
    weights = state(folder, tp, dtype=dtype, device=device)
    weights |= state(target, dtype=dtype, device=device, only=(EMBED,))
    head.load_state_dict(weights, assign=True)
    head.to(device).eval().requires_grad_(False).join()
    head.check_tokens()
    return head


def load_either(
    folder: Path, target: Path, tp: TensorParallel = SOLO, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> Decoder | Head:
    """The model in a checkpoint folder, or a head of the target in another folder."""
    if load_config(folder).head is None:
        return load(folder, tp, dtype=dtype, device=device)
    return load_head(folder, target, tp, dtype=dtype, device=device)


def check_draft(folders: Sequence[Path], configs: Sequence[ModelConfig]) -> None:
    """Raise EngineError where the draft, if there is one, is a hybrid, or a head of another target than the first."""
    if configs[1:] and configs[1].hybrid:
        raise EngineError(
            f"the draft {folders[1]} is a hybrid model: its states would have to go back over several of its steps when"
            " proposals are refused, which is not built; choose a draft with attention in all layers"
        )
    if configs[0].head is not None:
        raise EngineError(f"{folders[0]} is a head, which runs beside its target: give it as the draft")
    head = head_among(configs)
    if head is None:
        return
    mine, target = f"the head {folders[1]}", configs[0]
    advice = "choose the target that it was trained for, or train a head for this one"
    own = fingerprint(folders[0])
    for wrong, says in (
        (head.width != target.hidden, f"reads hidden states of {head.width} elements, the target's have"
         f" {target.hidden}"),
        (head.taps[-1] >= target.layers, f"reads layer {head.taps[-1]}, the target has layers 0 to"
         f" {target.layers - 1}"),
        (configs[1].vocab != target.vocab, f"is of a vocabulary of {configs[1].vocab}, the target's is"
         f" {target.vocab}"),
        (head.target != own, f"was trained for the target {head.target}, and {folders[0]} is {own}"),
    ):  # fmt: skip
        if wrong:
            raise EngineError(f"{mine} {says}: {advice}")


def state(
    folder: Path,
    tp: TensorParallel = SOLO,
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    only: Collection[str] = (),
) -> dict[str, Tensor]:
    """This TP rank's slice of each weight in a checkpoint folder, by our names; nothing else of the weights is read.

    A head has no embedding of its own. `only` are the names that are wanted, all by default.
    """
    config, hf = load_config(folder, dtype), is_hf(folder)
    weights = Weights(folder)
    with torch.device("meta"):
        kind = Decoder if config.head is None else Head
        full, mine = kind(config).state_dict(), kind(config, tp).state_dict()
    read = _read_hf if hf else _read
    if hf:
        _check_names(weights, config, set(full))
    found = {}
    for name in mine:
        if (only and name not in only) or (config.head is not None and name == EMBED):
            continue
        if not full[name].is_floating_point():
            found[name] = weights.read_whole(name, tuple(full[name].shape)).to(device)
            continue
        piece = read(weights, config, tp, name, tuple(full[name].shape))
        # The correction of expert scores decides near ties, so it stays as it is stored.
        kept = torch.float32 if name.endswith("correction") else getattr(torch, config.dtype)
        found[name] = piece.to(device=device, dtype=kept).contiguous()
    return found


def fingerprint(folder: Path) -> str:
    """A name for the weights of a checkpoint folder by their content, or by a sample of it if Hugging Face made it."""
    config = _require(folder, CONFIG_FILE).read_bytes()
    if is_hf(folder):
        return identity(folder, config)
    return hashlib.sha256(config + _require(folder, WEIGHTS_FILE).read_bytes()).hexdigest()[:16]


def shipped_head(form: str, target: Path) -> Path:
    """The folder of the shipped head of a form that was trained for a target; raises EngineError if there is none."""
    own, others = fingerprint(target), list[str]()
    for folder in sorted(path.parent for path in CHECKPOINTS.glob(f"*/{CONFIG_FILE}")):
        reads = load_config(folder).head
        if reads is not None and reads.form == form:
            if reads.target == own:
                return folder
            trained_for = folder.name.partition("-")[2]
            others.append(f"{folder.name} ({'--real' if trained_for == 'smollm2' else f'--target {trained_for}'})")
    raise EngineError(
        f"no {form} head of target {target} is shipped, only {', '.join(others)}: choose another draft, or one of these"
        " targets, or give the folder of a head"
    )


def _read(weights: Weights, config: ModelConfig, tp: TensorParallel, name: str, shape: tuple[int, ...]) -> Tensor:
    return weights.read(name, shape, cut(config, tp, name, shape))


def _read_hf(weights: Weights, config: ModelConfig, tp: TensorParallel, name: str, shape: tuple[int, ...]) -> Tensor:
    """This rank's slice of our weight `name` of full `shape`, from the tensor or tensors that hold it."""
    part, origin = cut(config, tp, name, shape), source(name, config)
    if ".experts." in name:
        mine = range(part[0].start, part[0].stop)
        return torch.stack([weights.read(origin.format(expert), shape[1:], part[1:]) for expert in mine])
    if name.endswith(("k_up", "v_up")):
        # One tensor holds both, head by head: first the rows that make keys, then those that make values.
        each = config.nope_dim + config.v_dim
        rows = slice(part[0].start * each, part[0].stop * each)
        both = weights.read(origin, (config.heads * each, config.latent), (rows, part[2]))
        own = slice(0, config.nope_dim) if name.endswith("k_up") else slice(config.nope_dim, each)
        return both.reshape(-1, each, config.latent)[:, own]
    return weights.read(origin, shape, part)


def _check_names(weights: Weights, config: ModelConfig, ours: set[str]) -> None:
    """Raise EngineError for tensors that the decoder would leave out."""
    experts = range(config.moe.experts if config.moe else 0)
    known = {source(name, config).format(e) for name in ours for e in (experts if ".experts." in name else (0,))}
    left = sorted(name for name in weights.names - known if not ignored(name, config))
    if config.tied and "lm_head.weight" in left:
        left.remove("lm_head.weight")
        shape = (config.vocab, config.hidden)
        if not torch.equal(weights.read("lm_head.weight", shape), weights.read(source("embed", config), shape)):
            raise EngineError("config.json: tie_word_embeddings is True, but lm_head.weight is not model.embed_tokens")
    if left:
        raise EngineError(f"checkpoint weights {weights.files[0].parent}: no use is known for {', '.join(left[:5])}")


def _fields(folder: Path) -> dict[str, object]:
    return json_object(_require(folder, CONFIG_FILE).read_text())


def _require(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise EngineError(f"checkpoint folder {folder} does not exist")
    path = folder / name
    if not path.is_file():
        raise EngineError(f"checkpoint folder {folder} has no {name}")
    return path
