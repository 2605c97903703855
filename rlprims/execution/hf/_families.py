"""What the code here can do with the models of transformers, by their ``model_type``. Each entry has its test."""

from typing import Any

import torch
from transformers import AutoConfig

_CAN = {
    "cohere": "packed sharded divided",
    "gemma": "packed fused sharded divided",
    "gemma2": "fused divided",
    "gemma3_text": "packed fused sharded divided",
    "gpt2": "packed fused",
    "gpt_neox": "packed divided",
    "granite": "packed sharded divided",
    "llama": "packed fused sharded divided",
    "mistral": "packed fused sharded divided",
    "mixtral": "packed routed",
    "olmo2": "packed fused sharded divided",
    "olmoe": "routed",
    "phi": "packed sharded divided",
    "phi3": "packed fused sharded divided",
    "qwen2": "packed fused sharded divided",
    "qwen2_moe": "packed fused routed",
    "qwen3": "packed fused sharded divided",
    "qwen3_moe": "packed fused routed",
    "smollm3": "packed fused divided",
    "starcoder2": "packed divided",
}


def _models_that_are(what: str) -> tuple[str, ...]:
    return tuple(kind for kind, can in _CAN.items() if what in can.split())


PACKED_MODELS = _models_that_are("packed")
"""The tests compare packed logits and gradients with padded ones."""
FUSED_HEAD_MODELS = _models_that_are("fused")
"""Logits = last hidden states times the head's weight, optionally with a soft cap."""
SHARDED_MODELS = _models_that_are("sharded")
"""The files store parameters under their own names, so that a rank can read its parts."""
TENSOR_PARALLEL_MODELS = _models_that_are("divided")
"""The tests compare logits and gradients of a group of ranks that divide the layers with those of one process."""
ROUTED_MODELS = _models_that_are("routed")
"""The tests compare recorded and replayed experts. The gates are a softmax of the router's logits, over all experts or
over the chosen ones."""

NOT_PACKED = {
    "bloom": "its attention adds a bias by position (ALiBi)",
    "falcon": "its attention may add a bias by position (ALiBi)",
    "gemma2": "its attention has a soft cap",
    "gpt_oss": "its attention has sinks",
    "mpt": "its attention adds a bias by position (ALiBi)",
}
"""Why the attention of a model cannot be packed."""


def without_data(auto: Any, path: str) -> Any:
    """A model of this class with parameters that have shapes but no data, from its config alone."""
    try:
        with torch.device("meta"):
            return auto.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load {path!r}: {str(error).splitlines()[0]}") from None
