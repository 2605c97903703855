"""Tiny models of the longest known types, in float64, and a batch for them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 32
FAMILIES = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral"),
    *("olmo2", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
"""Types that are also compared in float64, with divided layers and in ranks; the zoo has all."""
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
MORE = {
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None},  # sdpa has no caps
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def build(kind: str, **changes: Any) -> nn.Module:
    """A random model of that ``model_type``, in float64. Norms and biases are random too, so that they count."""
    settings = {**SMALL, **MORE.get(kind, {}), **changes}
    if kind == "gpt2":
        settings = {GPT2.get(name, name): value for name, value in settings.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **settings), attn_implementation="eager", experts_implementation="eager"
        )
        model.config._attn_implementation = "sdpa"  # not above: transformers 5.24 refuses it for gemma2
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    return model.eval().double()


def norms_in_float64(model: nn.Module) -> None:
    """Torch's in the place of transformers', which are in float32 and round: gradients too, of shared tokens once."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(len(module.weight), eps=module.variance_epsilon, dtype=torch.float64)  # type: ignore[arg-type]
            norm.weight = module.weight  # type: ignore[assignment]
            model.set_submodule(name, norm)


def ragged_batch() -> dict[str, Tensor]:
    """Prompts of 2, 3, 3, 1 and 2 tokens, the first and the last the same, and ragged responses, one of none."""
    prompts = torch.tensor([[0, 5, 6], [7, 5, 6], [7, 5, 6], [0, 0, 9], [31, 5, 6]])
    responses = torch.arange(25).reshape(5, 5) % 7 + 3
    in_prompt = torch.tensor([2, 3, 3, 1, 2])[:, None] > torch.arange(2, -1, -1)
    lengths = torch.tensor([5, 1, 3, 4, 0])
    return {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.cat([in_prompt, torch.arange(5) < lengths[:, None]], 1),
    }


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """By name; 0 for a parameter that is not used."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To 1e-6 of the largest: norms and rotary embeddings are float32 in every model."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=0, atol=1e-6 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )
