"""The demo's pretrained model: a GGUF file as checkpoint folders, its chat template, and what a user gets wrong."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from kvproto_reference import checkpoint, smollm2
from kvproto_reference.chat import ChatTemplate
from kvproto_reference.demo.__main__ import main
from kvproto_reference.errors import EngineError
from kvproto_reference.models.base import Dense

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 3
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>"
TOKENS = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "20"]
QUANTIZED = gguf.GGMLQuantizationType.Q4_1


def write_gguf(path: Path) -> None:
    """A Llama of random weights in 4 bits, as the package's file is written."""
    writer, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(1)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["h e", "2 0"])
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    kv = HIDDEN * KV_HEADS // HEADS
    matrices = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}  # fmt: skip
    shapes = {"token_embd": (len(TOKENS), HIDDEN)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in matrices.items()}
    for name, shape in shapes.items():
        drawn = draw.standard_normal(shape, np.float32) * shape[1] ** -0.5
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(drawn, QUANTIZED), raw_dtype=QUANTIZED)
    norms = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", draw.random(HIDDEN, np.float32) + 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.gguf, and the target that is made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf")
    smollm2.convert(folder / "tiny.gguf", folder / "target")
    return folder


def test_a_gguf_file_is_the_model_that_transformers_reads_of_it(made: Path) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(made / "tiny.gguf")
    config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    theirs = transformers.LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    left = theirs.load_state_dict(tensors, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
    theirs.tie_weights()
    model = checkpoint.load(made / "target")
    tokens, positions = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.arange(8)
    with torch.no_grad():
        wanted = theirs(tokens[None], use_cache=False).logits[0]
        found = model.forward(tokens, positions, Dense(model.config))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_digits_are_tokens_of_their_own_and_the_template_s_words_too(made: Path) -> None:
    tokenizer = checkpoint.load_tokenizer(made / "target")
    ids = tokenizer.encode(ChatTemplate(made / "target").prompt("he 2026").encode())
    assert [TOKENS[i] for i in ids if i < 2] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert TOKENS.index("he") in ids
    assert TOKENS.index("20") not in ids
    assert tokenizer.eos == {1}
    assert tokenizer.decode(ids) == b"user\nhe 2026\n"


def test_a_template_among_the_settings_of_a_tokenizer(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate(tmp_path).prompt("hello") == "<s>hello"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template"),
        ("{% for %}", "cannot be read"),
        ("{{ messages[3].content.x }}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),  # it cannot reach the engine
    ],
)
def test_templates_that_do_not_serve(tmp_path: Path, template: str | None, says: str) -> None:
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(EngineError, match=says):
        ChatTemplate(tmp_path).prompt("hello")


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"not in .*: `python -m kvproto_reference.smollm2` fetches it \(93 MB"):
        smollm2.folder(tmp_path)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--attach", "/tmp"], "--real starts engines of its own: leave --attach out"),
        (["--model", "mla"], "--real brings a model of its own: leave --model out"),
        (["--json", "--picture", "x.svg"], "leave --json out"),
        (["--decode-page-size", "0"], "--decode-page-size, .* must be at least 1"),
    ],
)
def test_options_that_do_not_go_with_it(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--real", *args]) == 1
    said = capsys.readouterr().err
    assert re.search(says, said), said
