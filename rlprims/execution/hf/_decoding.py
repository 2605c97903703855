"""Attention of one new token in each row, where several heads read the same keys and values.

Torch's is handed those of each head, which Hugging Face copies for it at every token if prompts are padded: the whole
cache. Here the heads that share keys are the queries of one, and nothing is copied.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlprims.execution.hf._packed import attending

_NAME = "rlprims_decoding"


def decoding(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, a forward with a cache attends so, if the model's attention can be exchanged."""
    return attending(model, _NAME)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Of (B, heads, n, d) with keys and values (B, shared heads, L, d) and a mask for all heads; (B, n, heads, d)."""
    rows, heads, new, width = query.shape
    shared = key.shape[1]
    if new > 1 or shared == heads or (attention_mask is not None and attention_mask.shape[1] > 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    grouped = query.reshape(rows, shared, heads // shared, width)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
