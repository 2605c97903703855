"""The load-balancing loss of mixtures of experts: their routers learn to use all experts alike."""

from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.masking import check_choice, check_placements, check_range, check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask

BalanceForm: TypeAlias = Literal["mixtral", "switch"]


@described
def load_balance(
    router_logits: Annotated[Tensor, "float (B, T, L, E) or (N, L, E)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    top_k: int = 2,
    form: BalanceForm = "mixtral",
    expert_counts: Annotated[Tensor, "int or float (L, E)"] | None = None,
) -> PerToken:
    """The auxiliary loss of routers, Switch Transformer (arXiv:2101.03961), eq. 4 to 6: E Σ_i f_i P_i for E experts.

    f_i is the share of the tokens that expert i gets, and P_i the mean of p_i, where p = softmax(router_logits). f is
    a count without a gradient, so the loss is a mean over tokens, of ℓ_t = E Σ_i f_i p_ti. This function returns ℓ_t:
    the loss is its :func:`token_mean`. With the ``expert_counts`` and the totals of a step, micro-batches sum to it.

    ``form="mixtral"``, as in transformers: f and P are over the tokens of all L layers, and f sums to K.
    "switch", as in Megatron-LM: f sums to 1, and the losses of the layers are added.
    If all experts are used alike the loss is K or L.

    Args:
        router_logits: of every layer with experts.
        response_mask: True on the tokens that count, prompts among them; the others are never read.
        top_k: K, the experts of a token, in [1, E].
        expert_counts: how many tokens each expert of each layer gets in the whole step: the sum of
            ``chosen_experts.flatten().bincount(minlength=E)`` over its micro-batches. None: in this batch, where a
            token's experts are those with the largest logits.

    >>> logits = torch.tensor([3.0, 1.0]).log().expand(1, 4, 1, 2)  # all tokens go to the first expert, with p = ¾
    >>> load_balance(logits, torch.ones(1, 4, dtype=torch.bool), top_k=1)  # 2 (1 · ¾ + 0 · ¼)
    tensor([[1.5000, 1.5000, 1.5000, 1.5000]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_choice("form", form, BalanceForm)
    check_placements(response_mask.dim() - 2, router_logits=router_logits)
    layers, experts = counted = router_logits.shape[-2:]
    given = counted if expert_counts is None else expert_counts.shape
    if router_logits.shape[:-2] != response_mask.shape or given != counted or not router_logits.is_floating_point():
        raise ValueError(
            f"router_logits has shape {tuple(router_logits.shape)} and dtype {router_logits.dtype}, expected floats "
            f"({', '.join(map(str, response_mask.shape))}, L, E); expert_counts is (L, E), here {tuple(given)}"
        )
    check_range(1, experts, ": of the experts of router_logits", top_k=top_k)

    logits = zero_outside(router_logits, response_mask[..., None, None])
    p = logits.softmax(-1)
    # Sources disagree on the batch of f: transformers (which TRL calls) and Megatron's aux_loss take a micro-batch, its
    # seq_aux_loss a sequence; its global_aux_loss and Qwen (arXiv:2501.11873) the whole step, as expert_counts here.
    # Padding counts in transformers without attention_mask, and in Megatron without padding_mask.
    if expert_counts is None:
        chosen = torch.zeros_like(p.detach()).scatter(-1, logits.topk(top_k).indices, 1.0)
        expert_counts = zero_outside(chosen, response_mask[..., None, None]).flatten(0, -3).sum(0)
    counts = expert_counts.detach().to(p.dtype)
    # And on layers: transformers joins their tokens and does not divide f by K; Megatron divides, and adds up layers.
    if form == "mixtral":
        counts = counts.sum(0, keepdim=True)
    f = counts / counts.sum(-1, keepdim=True).clamp(min=1) * (top_k / layers if form == "mixtral" else 1)
    return zero_outside(experts * (p * f).sum((-2, -1)), response_mask)
