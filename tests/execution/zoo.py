"""The zoo: a tiny random model of every type that transformers loads as a causal language model, and rows for it.

Sizes are set under the names that a type's config has; :data:`MORE` has what some types need besides.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 64
SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": True},
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "is_decoder": True, "sliding_window": 5},
    **{"final_logit_softcapping": 5.0},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 2),
    **{"num_key_value_heads": 1, "head_dim": 16, "encoder_layers": 2, "encoder_attention_heads": 2},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "attention_chunk_size": 4, "local_attention": 10},
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
}
_TWO_KEYS = {"num_key_value_heads": 2}
_NO_MORE_TOKENS = {"unpadded_vocab_size": VOCABULARY}
_LAST_IS_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
_TEXT = {
    k: SMALL[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "initializer_range")
}
_TEXT |= {"num_attention_heads": 2, "max_position_embeddings": 64}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = _ROPE | {"mrope_section": [2, 2, 4]}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama"), _TWO_KEYS),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"), _TWO_KEYS),
    **dict.fromkeys(("bailing_hybrid", "dots3_note_text"), _TWO_KEYS),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _NO_MORE_TOKENS),
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _MROPE, "sliding_attention": _MROPE}},
    "cpmant": {"dim_head": 16, "dim_ff": 48, "prompt_types": 2, "prompt_length": 4, "segment_types": 2},
    "dbrx": {"tie_word_embeddings": False, "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0}}
    | {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_top_k": 2}, "max_seq_len": 64},
    "deepseek_v4": {"head_dim": 16, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 4}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": _LAST_IS_ATTENTION | {"shared_intermediate_size": 16},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 1, "intermediate_size": 48, "layer_types": None}
    | {"activation_sparsity_pattern": None, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    | {"laurel_rank": 4, "altup_num_inputs": 2},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "inkling_text": {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16}
    | {"sliding_window_size": 5, "rel_extent": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 2, "num_experts_per_token": 2, "q_lora_rank": None}
    | {"num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"floor_scale": 4, "num_hidden_layers": 4, "intermediate_size_mlp": 48}
    | {"layer_types": ["chunked_attention", "full_attention"] * 2, "interleave_moe_layer_step": 2},
    "longcat_flash": {"head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2}
    | {"zero_expert_num": 2}
    | _TWO_KEYS,
    "mamba2": {"num_heads": 4},
    "minimax_m3_vl_text": {"dense_intermediate_size": 48, "shared_intermediate_size": 16, "rotary_dim": 8}
    | {"index_block_size": 4, "layer_types": ["full_attention", "minimax_m3_sparse"], "index_topk_blocks": 1},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
        }
        | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    # Without the floor of time steps, as models are loaded.
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "time_step_min": 1e-30}
    | {"moe_shared_expert_intermediate_size": 16},
    "prophetnet": {"num_encoder_layers": 1, "num_decoder_layers": 2, "num_encoder_attention_heads": 2}
    | {"num_decoder_attention_heads": 2, "relative_max_distance": 16},
    "qwen4_exp_text": {"hc_count": 2, "hc_lowrank": 8, "ple_embed_dim": 8, "ngram_vocab_size_base": 64}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4}
    | {"indexer_compress_ratio": 2},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 16, "feed_forward_size": 48}
    | {"attn_layers": ["local", "lsh"]},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_embed_dim": 8, "pronunciation_vocab_size": 64, "shape_embed_dim": 8}
    | {"shape_vocab_size": 64},
    "xlnet": {"d_inner": 48, "d_head": 16},
    "xlstm": {"num_blocks": 2, "embedding_dim": 32, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"mamba_dt_rank": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}
    | {"num_hidden_layers": 4, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "num_mem_blocks": 1}
    | {"adapter_rank": 4, "time_step_min": 1e-30},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}


NOT_HERE = {
    "blt": "its text is bytes in patches",
    "cpmant": "it makes its own prompt of embeddings",
    "dots3_note": "its parts for images and sound cannot be small; its text part is dots3_note_text",
    "emu3": "its text part cannot be loaded alone once it is saved",
    "gemma3n": "its vision part needs timm; its text part is gemma3n_text",
    "gemma4_assistant": "it drafts for another model",
    "gemma4_unified_assistant": "it drafts for another model",
    "got_ocr2": "it reads images",
    "moss_transcribe_diarize": "its part for sound cannot be small",
    "musicgen": "it writes sound",
    "musicgen_melody": "it writes sound",
    "phi4_multimodal": "its parts for sound and images cannot be small",
    "reformer": "it has gradients in training mode alone, with random hashes",
}
"""Types without a tiny model, and why."""


def _settings(kind: str) -> dict[str, Any]:
    cls = CONFIG_MAPPING[kind]
    names = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    names |= {*inspect.signature(cls.__init__).parameters, *cls.attribute_map}
    found = {k: v for k, v in SMALL.items() if k in names and not isinstance(getattr(cls, k, None), property)}
    found = {k: v for k, v in found.items() if cls.attribute_map.get(k) not in found}
    default = cls()
    for name in ("layer_types", "mlp_layer_types"):  # a layer of each type
        if name in names and name not in cls.attribute_map:
            each = list(dict.fromkeys(getattr(default, name, None) or ()))
            if each == ["full_attention"] and getattr(default, "sliding_window", None):
                each = ["sliding_attention", "full_attention"]
            found[name] = (each * 2)[: max(2, len(each))] or None
    layers = max(len(found.get(name) or ()) for name in ("layer_types", "mlp_layer_types"))
    for name in ("layer_types", "mlp_layer_types"):
        if found.get(name):
            found[name] = (found[name] * layers)[:layers]
    if layers:
        found["num_hidden_layers"] = layers
    return found | MORE.get(kind, {})


def build(kind: str, **changes: Any) -> nn.Module:
    """A random model of that ``model_type``. Norms and biases are random too, so that they count."""
    settings = _settings(kind)
    for name, part in CONFIG_MAPPING[kind].sub_configs.items():
        if name in ("text_config", "vision_config") and hasattr(part, "model_type"):
            settings[name] = _settings(part.model_type) | (changes if name == "text_config" else {})
            if kind == "gemma3":  # it does not apply the cap of its text part
                settings[name] |= {"final_logit_softcapping": None}
    if "text_config" not in settings:
        settings |= changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**settings)
        model: nn.Module = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()
