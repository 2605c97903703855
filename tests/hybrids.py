"""Tiny random models whose layers keep states of what they have read: linear attention, state spaces, convolutions."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests import tiny

_SIZES = {
    **{"vocab_size": len(tiny.VOCABULARY), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
    **{"initializer_range": 0.2, "pad_token_id": tiny.PAD_ID, "eos_token_id": tiny.EOS_ID, "bos_token_id": None},
}
_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **{f"linear_{of}_head_dim": 8 for of in ("key", "value")},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, **_LAYERS},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2},
        **{"mamba_d_state": 8, "use_mamba_kernels": False},
    },
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "num_hidden_layers": 4, "n_groups": 1},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
    },
    "granitemoehybrid": {
        **{**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "kimi_linear": {
        **{**_LATENT, **_LAYERS, "linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    },
    "minimax": {
        **{"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "block_size": 4},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "olmo_hybrid": _DELTA,
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2},
    "falcon_mamba": {"state_size": 8},
}
NO_ATTENTION = ("mamba", "mamba2", "falcon_mamba")
"""For these transformers has no sdpa: ``model.attention: eager``."""


def save_hybrid(directory: Path, kind: str, **changes: Any) -> Path:
    """With the tokenizer; norms and biases are random too, so that they count."""
    config = AutoConfig.for_model(kind, **{**_SIZES, **HYBRIDS[kind], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


@torch.no_grad()
def alone(model: nn.Module, batch: Any) -> Tensor:
    """(B, T): the log-probs of the responses, each row read alone and whole; 0 elsewhere."""
    width, found = batch["prompts"].shape[1], torch.zeros(batch["response_mask"].shape)
    rows = torch.cat([batch["prompts"], batch["responses"]], 1)
    for i, attended in enumerate(batch["attention_mask"].bool()):
        length, ids = int(attended[width:].sum()), rows[i, attended]
        scores = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        found[i, :length] = scores[-length - 1 : -1].gather(-1, ids[-length:, None])[:, 0] if length else 0
    return found
