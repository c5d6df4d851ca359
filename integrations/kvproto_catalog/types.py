"""Model types that are known, and which of the fields that `describe` reads their classes in transformers have."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs


@attrs.frozen
class ModelClass:
    """The fields of a type's configuration class on which caches may depend."""

    fields: frozenset[str] = frozenset()
    """Fields that the class or the model's code reads; all others it ignores."""
    defaults: Mapping[str, Any] = {}
    """By field: the value of a file that leaves it out."""
    derived: frozenset[str] = frozenset()
    """Fields that the class derives from others, in another way than is known here, if a file leaves them out."""
    aliases: Mapping[str, str] = {}
    """By other name of a field: its name."""
    text: str | None = None
    """The type of its language model, if that is a part of it."""


def _read() -> dict[str, ModelClass]:
    rows = json.loads(files(__package__).joinpath("classes.json").read_text())
    return {
        kind: ModelClass(
            frozenset(row.get("fields", ())),
            row.get("defaults", {}),
            frozenset(row.get("derived", ())),
            row.get("aliases", {}),
            row.get("text"),
        )
        for kind, row in rows.items()
    }


CLASSES: dict[str, ModelClass] = _read()
"""By type: its class, as `python -m tools.classes` reads it from transformers."""
_TYPES = (
    "afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert bert-generation biogpt "
    "bitnet camembert cohere cohere2 cohere2_moe cohere_compass_text cwm data2vec-text deepseek_v2 deepseek_v3 "
    "deepseek_v32 deepseek_v4 diffllama dory dots1 dots3_note dots3_note_text electra ernie ernie4_5 ernie4_5_moe "
    "exaone exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3 gemma3_text "
    "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite "
    "glm_moe_dsa gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared helium hrm_text hunyuan hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 "
    "iquestcoder jais2 jamba kimi_k2 kimi_linear kolibri1 laguna lara_mini lfm2 lfm3 llama llama4 llama4_text "
    "longcat_flash mamba mamba2 megatron-bert mellum mimo mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3 "
    "minimax_m3_vl_text minimax_text_01 ministral ministral3 mistral mixtral moshi moss_transcribe_diarize nanochat "
    "nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next rembert roberta "
    "roberta-prelayernorm roc_bert roformer sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 "
    "step3_text step3_vl vaultgemma xlm-roberta xlm-roberta-xl xmod youtu "
)
TYPES = frozenset(_TYPES.split())
"""Model types that are known: `python -m tools.models` compares each, or says why it cannot."""
