"""Model types that are known, and which of their fields have a default that a config.json does not show."""

OWN_DEFAULTS: dict[str, frozenset[str]] = {
    name: frozenset(types.split())
    for name, types in {
        "attn_layer_offset": "jamba",
        "head_dim": """
            afmoe cohere2_moe cwm deepseek_v4 dory ernie4_5 flint gemma gemma2 gemma3n_text gemma4_text
            gemma4_unified_text glm glm4 gpt_oss helium hrm_text hy_v3 internlm3 iquestcoder lara_mini lfm3
            llama4_text mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral3 nemotron_h qwen3
            qwen3_5_moe_text qwen3_5_text qwen3_next sarvam_moe solar_open vaultgemma
        """,
        "index_head_dim": "axk2 deepseek_v32 dots3_note_text",
        "indexer_types": "hy_v4",
        "kv_lora_rank": """
            axk1 bailing_hybrid deepseek_v2 deepseek_v3 dots3_note_text kimi_linear longcat_flash minicpm3
            sarvam_mla youtu
        """,
        "layer_types": """
            afmoe beam cohere_compass_text cwm dory dots1 dots3_note_text flint gemma3n_text gemma4_unified_text
            granite_swa granitemoe_swa kolibri1 laguna lfm3 mellum minimax olmo3 vaultgemma
        """,
        "mamba_expand": "jamba",
        "mamba_n_heads": "falcon_h1",
        "multi_query": "falcon",
        "num_key_value_heads": """
            beam bitnet cwm dory dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 flint gemma gemma2
            gemma3n_text gemma4_text gemma4_unified_text glm glm4 gpt_oss granite_swa helium hy_v3 internlm3
            iquestcoder jamba kolibri1 laguna lara_mini lfm2 lfm3 llama4_text mellum minimax minimax_m2
            minimax_m3_vl_text ministral ministral3 mistral mixtral nemotron_h phi4_multimodal phimoe qwen2
            qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next sarvam_moe seed_oss smollm3
            solar_open stablelm starcoder2 vaultgemma
        """,
        "num_kv_shared_layers": "gemma3n_text",
        "num_layers_per_stack": "hrm_text",
        "per_layer_config": "dots3_note_text gemma4_unified_text",
        "sliding_window": """
            afmoe beam cohere2 cohere2_moe cwm deepseek_v4 dory dots3_note_text exaone4 exaone_moe flint gemma2
            gemma3n_text gemma4_text gemma4_unified_text gpt_oss granite_swa granitemoe_swa kolibri1 lara_mini lfm3
            mimo_v2_flash ministral mistral moshi olmo3 vaultgemma
        """,
        "v_head_dim": "mimo_v2_flash",
    }.items()
}
"""By field: the model types whose configuration class gives it a value of its own if a file leaves it out."""
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
