"""A token-wise loss computed directly from hidden states and the LM head."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from rlprims._described import described
from rlprims._sharding import check_vocab
from rlprims.kernels import accelerated
from rlprims.logprobs._from_hidden import check_head, linear_log_probs
from rlprims.logprobs._from_logits import check_kept
from rlprims.masking import zero_outside
from rlprims.types import PerToken, SamplingSupport, Scalar, TokenMask, VocabShard


class FusedLoss(NamedTuple):
    """The loss; and its log-probs and the entropies, without gradient and 0 outside the mask."""

    loss: Scalar
    log_probs: PerToken
    entropies: PerToken


@accelerated(cpu="linear_log_probs", cuda="linear_log_probs", differentiable=True)
def linear_token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    weights: Tensor,
    mask: Tensor,
    total_loss: Callable[..., Tensor],
    temperature: float,
    soft_cap: float | None,
    kept: SamplingSupport | None = None,
    vocab: VocabShard | None = None,
    /,
    **data: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``total_loss(log_probs, weights, mask, **data)`` over the valid tokens of N; and log-probs and entropies."""
    states = torch.where(mask[:, None], hidden, 0.0)
    log_probs, entropies = linear_log_probs.formula(states, head_weight, token_ids, temperature, soft_cap, kept, vocab)
    total = total_loss(log_probs, weights, mask, **data)
    return total, zero_outside(log_probs.detach(), mask), zero_outside(entropies.detach(), mask)


@described
def fused_loss(
    hidden: Annotated[Tensor, "float (B, T, H) or (N, H)"],
    head_weight: Annotated[Tensor, "float (V, H)"],
    token_ids: Annotated[Tensor, "int64 (B, T) or (N,)"],
    weights: PerToken,
    response_mask: TokenMask,
    loss: Callable[..., Tensor],
    data: Mapping[str, Tensor],
    kept: SamplingSupport | None = None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    vocab: VocabShard | None = None,
) -> FusedLoss:
    """Σ over valid tokens of weight · loss(log_prob, data), from hidden states and the LM head, and its gradient.

    The result equals the loss from the log-probs of :func:`from_hidden` and costs less: in eager code a kernel computes
    the derivative of the loss tile by tile and overwrites each tile's logits with their gradient. This takes three
    products with the head instead of four, and memory for one tile and the gradient of the weight. Tokens outside the
    mask are skipped. Compiled code and second derivatives have all logits in memory.

    ``loss`` is any token-wise loss of ``losses``, or a function of the same form that ``rlprims.types.token_wise``
    declares. It is called for some tokens at a time, by name, with ``log_probs``, those tokens' part of each tensor of
    ``data``, ``response_mask`` and ``cu_seqlens``. Bind its hyperparameters before:
    ``functools.partial(losses.clipped_surrogate, clip_high=0.28)``. It may be a sum of losses. A loss that needs whole
    sequences (GSPO, GMPO, ...) is refused: a tile may end inside one. The loss cannot use the entropies.

    ``weights`` define the aggregation, which is linear: for ``losses.token_mean`` 1 / totals.tokens for each token, and
    in general its gradient, ``torch.func.grad(aggregation)(torch.zeros(response_mask.shape), response_mask)``.

    The kernel computes the gradient in the forward pass, so backward can run once only; under ``torch.no_grad`` no
    gradient is computed. The kernel reads the number of valid tokens on the host.

    Args:
        weights: the factor of each token's loss.
        data: the other tensors that the loss needs, by name; each like token_ids. They get no gradient.
        vocab: if head_weight is this rank's rows of the head; see :func:`from_hidden`.

    Returns:
        loss, float32 or float64 (), with a gradient to hidden and head_weight; log_probs, entropies in nats, without.

    >>> from rlprims.types import token_wise
    >>> hidden, head = torch.ones(1, 2, 1), torch.tensor([[0.0], [0.0]])
    >>> m, tokens = torch.tensor([[True, False]]), torch.tensor([[0, 1]])
    >>> surprise = token_wise(lambda log_probs, **_: -log_probs)
    >>> fused_loss(hidden, head, tokens, m / m.sum(), m, surprise, {})
    FusedLoss(loss=tensor(0.6931), log_probs=tensor([[-0.6931,  0.0000]]), entropies=tensor([[0.6931, 0.0000]]))
    """
    check_head(hidden, head_weight, token_ids, temperature, soft_cap)
    for name, x in {"weights": weights, "response_mask": response_mask, **data}.items():
        if x.shape != token_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, token_ids has {tuple(token_ids.shape)}: "
                "expected both per token, because the loss is computed for tiles of tokens"
            )
    if response_mask.dtype is not torch.bool:
        raise ValueError(
            f"response_mask has dtype {response_mask.dtype}, expected torch.bool: pass response_mask.bool()"
        )
    size = check_vocab(vocab, head_weight.shape[0], torch.where(response_mask, token_ids, 0))
    if kept is not None:
        check_kept(kept, token_ids.shape, size, token_ids, response_mask)
    _check_token_wise(loss)
    compute = linear_token_loss if vocab is None else partial(_of_a_shard, vocab)
    states, flat_data = rearrange(hidden, "... h -> (...) h"), {name: x.detach().flatten() for name, x in data.items()}
    of_tokens = token_ids.flatten(), weights.detach().flatten(), response_mask.flatten()
    options, total_loss = (temperature, soft_cap, kept), partial(_total, loss)
    total, *per_token = compute(states, head_weight, *of_tokens, total_loss, *options, **flat_data)
    return FusedLoss(total, *(x.reshape(token_ids.shape) for x in per_token))


def _of_a_shard(vocab: VocabShard, *args: Any, **data: Tensor) -> Any:
    """Computed by the formula: the kernels do not support shards."""
    formula: Any = linear_token_loss.formula
    return formula(*args, vocab, **data)


def _total(loss: Callable[..., Tensor], log_probs: Tensor, weights: Tensor, mask: Tensor, /, **data: Tensor) -> Scalar:
    """Σ weight · loss over the valid tokens."""
    cu_seqlens = torch.arange(2, device=mask.device) * mask.shape[0]
    per_token = loss(log_probs=log_probs, response_mask=mask, cu_seqlens=cu_seqlens, **data)
    if per_token.shape != log_probs.shape:
        raise ValueError(
            f"loss returned shape {tuple(per_token.shape)} for {log_probs.shape[0]} tokens, "
            f"expected ({log_probs.shape[0]},): one number for each token"
        )
    return (zero_outside(per_token, mask) * zero_outside(weights, mask)).sum()


def _check_token_wise(loss: Callable[..., Tensor]) -> None:
    """Raise ``ValueError`` unless the loss, or the function that a partial binds, is declared token-wise."""
    function = loss
    while not getattr(function, "token_wise", False):
        if not isinstance(function, partial):
            name = getattr(function, "__name__", repr(function))
            raise ValueError(
                f"loss {name} is not declared token-wise. If it needs whole sequences, use the log-probs of "
                "from_hidden instead; if each token's loss depends on that token's data only, "
                "declare it: rlprims.types.token_wise(loss)"
            )
        function = function.func
