"""See :func:`fused_loss`."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.logprobs._head import add_to_weight_, check_head, surprise_slopes, tiles, to_hidden, write_logits_
from rlprims.masking import empty_like, upcast
from rlprims.types import PerToken, Scalar, TokenMask


class FusedLoss(NamedTuple):
    """The loss, and the log-probs that it was made of, and entropies: without gradient, 0 outside the mask."""

    loss: Scalar
    log_probs: PerToken
    entropies: PerToken


def fused_loss(
    hidden: Annotated[Tensor, "float (B, T, H) or (N, H)"],
    head_weight: Annotated[Tensor, "float (V, H)"],
    token_ids: Annotated[Tensor, "int64 (B, T) or (N,)"],
    weights: PerToken,
    response_mask: TokenMask,
    loss: Callable[..., Tensor],
    data: Mapping[str, Tensor],
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> FusedLoss:
    """Σ over valid tokens of weight · loss(log_prob, data), from hidden states and the LM head, and its gradient.

    The same number as the loss of :func:`from_hidden`'s log-probs, cheaper: while a tile's logits are there, the loss
    is asked for its slope and they become their own gradient in place. So there are three products with the head and
    not four, and no more memory than a tile and the gradient of the weight; tokens outside the mask meet no head.

    ``loss`` is any token-wise loss of ``losses``, or a function of the same form. It is called for each tile by name,
    with ``log_probs``, the tile's part of each tensor of ``data``, ``response_mask`` (all True) and ``cu_seqlens``;
    hyperparameters are bound before: ``functools.partial(losses.clipped_surrogate, clip_high=0.28)``. A sum of losses
    is a function too. One that needs whole sequences (GSPO, GMPO, ...) reads ``cu_seqlens`` and is refused: a tile ends
    anywhere. Entropies are given back, and not offered to the loss.

    ``weights`` are the aggregation, which is linear: for ``losses.token_mean`` 1 / totals.tokens for each token, and
    for any of them its gradient, ``torch.func.grad(aggregation)(torch.zeros(response_mask.shape), response_mask)``.

    The gradient is made in the forward pass and handed over in backward, which therefore runs once and is first order;
    under ``torch.no_grad`` none is made. The number of valid tokens is read by the host. ``torch.compile`` breaks the
    graph here, because the loss is differentiated inside.

    Args:
        hidden: float (B, T, H) or (N, H), the last hidden states, of the positions that predict the tokens.
        head_weight: float (V, H), the weight of the head, in the dtype of hidden.
        token_ids: int64 (B, T) or (N,), in [0, V).
        weights: float, like token_ids: what a token's loss counts.
        response_mask: bool, like token_ids.
        loss: of one tile, see above: per token, like log_probs.
        data: what the loss reads beside log_probs, by name; each like token_ids. Constants.
        temperature: above 0, of the logits.
        soft_cap: c > 0 for logits c · tanh(z / c), or None.

    Returns:
        loss float32 (or float64 if given) (), the only gradient, to hidden and head_weight; log_probs and entropies
        in nats.

    Raises:
        ValueError: shapes or dtypes that do not fit; a loss of whole sequences; temperature or soft_cap <= 0.

    >>> hidden, head = torch.ones(1, 2, 1), torch.tensor([[0.0], [0.0]])
    >>> m, tokens = torch.tensor([[True, False]]), torch.tensor([[0, 1]])
    >>> fused_loss(hidden, head, tokens, m / m.sum(), m, lambda log_probs, **_: -log_probs, {})
    FusedLoss(loss=tensor(0.6931), log_probs=tensor([[-0.6931,  0.0000]]), entropies=tensor([[0.6931, 0.0000]]))
    """
    check_head(hidden, head_weight, token_ids, temperature, soft_cap)
    for name, x in {"weights": weights, "response_mask": response_mask, **data}.items():
        if x.shape != token_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, token_ids has {tuple(token_ids.shape)}: "
                "both must be per token, for a tile knows no sequences"
            )
    if response_mask.dtype is not torch.bool:
        raise ValueError(f"response_mask has dtype {response_mask.dtype}, needs torch.bool: pass response_mask.bool()")
    valid = response_mask.flatten().nonzero()[:, 0]

    def weighted(log_probs: Tensor, part: slice) -> Tensor:
        """Σ weight · loss over some of the valid tokens."""
        here = valid[part]
        sliced = {name: x.flatten()[here].detach() for name, x in data.items()}
        mask, ends = torch.ones_like(here, dtype=torch.bool), torch.tensor([0, len(here)]).as_subclass(_Unknown)
        per_token = loss(log_probs=log_probs, response_mask=mask, cu_seqlens=ends, **sliced)
        if per_token.shape != log_probs.shape:
            raise ValueError(
                f"loss gives shape {tuple(per_token.shape)} for {len(here)} tokens, needs ({len(here)},): one each"
            )
        return (per_token * upcast(weights.flatten()[here].detach())).sum()

    rows = hidden.reshape(-1, hidden.shape[-1])
    if not torch.is_grad_enabled():
        rows, head_weight = rows.detach(), head_weight.detach()
    total, *per_token = _FusedLoss.apply(rows, head_weight, token_ids.flatten(), valid, weighted, temperature, soft_cap)
    return FusedLoss(total, *(x.reshape(token_ids.shape) for x in per_token))


class _FusedLoss(torch.autograd.Function):
    """The gradients are made while each tile's logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        valid: Tensor,
        weighted: Callable[[Tensor, slice], Tensor],
        temperature: float,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = upcast(hidden.new_zeros(()))
        log_probs, entropies = total.new_zeros(len(hidden)), total.new_zeros(len(hidden))
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = empty_like(head_weight, total.dtype).zero_() if needs_weight else None
        for part, tile, slopes in tiles(len(valid), head_weight, with_slopes=True):
            here = valid[part]
            states = hidden[here]
            write_logits_(tile, states, head_weight)
            spread = total.new_empty(len(here))
            leaf = surprise_slopes(tile, token_ids[here], temperature, soft_cap, slopes, spread).requires_grad_()
            with torch.enable_grad():
                share = weighted(leaf, part)
            total += share.detach()
            log_probs[here], entropies[here] = leaf.detach(), spread
            if not (needs_hidden or needs_weight):
                continue
            (slope,) = torch.autograd.grad(share, leaf)
            scale = -slope[:, None] / temperature
            if grad_hidden is not None:
                grad_hidden[here] = (to_hidden(slopes, head_weight) * scale).to(hidden.dtype)
            if grad_weight is not None:
                add_to_weight_(grad_weight, slopes, (states * scale).to(hidden.dtype))
        ctx.gradients = grad_hidden, None if grad_weight is None else grad_weight.to(head_weight.dtype)
        ctx.mark_non_differentiable(log_probs, entropies)
        return total, log_probs, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward of fused_loss runs once: its gradients were handed over. Call fused_loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(grad) for x in gradients), None, None, None, None, None


class _Unknown(Tensor):
    """``cu_seqlens`` of a tile: it has a shape and a dtype, and whoever asks for more is not token-wise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.dim, Tensor.is_floating_point, Tensor.__len__):
            return super().__torch_function__(func, types, args, kwargs)
        raise ValueError(
            f"loss reads cu_seqlens ({func.__name__}): it needs whole sequences, and a tile of tokens has none. "
            "Take the log-probs of from_hidden"
        )
