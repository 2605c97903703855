"""A token-wise loss, or a divergence from a teacher, computed directly from hidden states and LM heads."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from rlprims._described import described
from rlprims._divergence import Divergence, divergence_of
from rlprims._sharding import check_vocab, shared
from rlprims.kernels import accelerated, without_autocast
from rlprims.logprobs._from_hidden import check_head, linear_log_probs
from rlprims.logprobs._from_logits import check_kept
from rlprims.masking import check_above, check_choice, check_tokens, upcast, zero_outside
from rlprims.types import CuSeqlens, PerToken, SamplingSupport, Scalar, TokenMask, VocabShard, token_wise


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
    states, flat_data = rearrange(hidden, "... h -> (...) h"), {name: x.detach().flatten() for name, x in data.items()}
    of_tokens = token_ids.flatten(), weights.detach().flatten(), response_mask.flatten()
    total, *per_token = linear_token_loss(
        states, head_weight, *of_tokens, partial(_total, loss), temperature, soft_cap, kept, vocab, **flat_data
    )
    return FusedLoss(total, *(x.reshape(token_ids.shape) for x in per_token))


@accelerated(cpu="linear_log_probs", cuda="linear_log_probs", differentiable=True)
def linear_divergence(
    hidden: Tensor,
    head_weight: Tensor,
    teacher: tuple[Tensor, Tensor],
    mask: Tensor,
    measure: Callable[[Tensor, Tensor], Tensor],
    vocab: VocabShard | None = None,
) -> tuple[Tensor]:
    """``measure(logits, teacher_logits)`` of the valid tokens, 0 elsewhere; NaN if a hidden state is not finite."""
    finite = hidden.isfinite().all(-1) & teacher[0].isfinite().all(-1)
    models = (shared(vocab, hidden), head_weight), teacher
    with without_autocast(hidden):
        logits = (upcast(torch.where((mask & finite)[..., None], x, 0.0)) @ upcast(head).T for x, head in models)
        values = measure(*logits)
    return (zero_outside(torch.where(finite, values, torch.nan), mask),)


@described
@token_wise
def fused_full_kl(
    hidden: Annotated[Tensor, "float (B, T, H) or (N, H)"],
    head_weight: Annotated[Tensor, "float (V, H)"],
    teacher_hidden: Annotated[Tensor, "float (B, T, H) or (N, H)"],
    teacher_head_weight: Annotated[Tensor, "float (V, H)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    divergence: Divergence = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
    vocab: VocabShard | None = None,
) -> PerToken:
    """``losses.full_kl``, or ``losses.jsd``, of the logits hidden @ head_weightᵀ of student and teacher, in nats.

    With the student's π and the teacher's q over the whole vocabulary the divergence "reverse" is KL(π ‖ q), "forward"
    KL(q ‖ π), and "jsd" β KL(q ‖ m) + (1 − β) KL(π ‖ m) with m = β q + (1 − β) π. The teacher may have another width H.

    In eager code a kernel computes one tile of tokens at a time, forward and again in backward: a tile's logits of both
    models are in memory, and only the arguments are saved. Tokens outside the mask are skipped. Compiled code, second
    derivatives and shards have all logits in memory. A hidden state with NaN or Inf gives NaN and no gradient.

    Args:
        hidden, head_weight: of the student; only they get a gradient.
        teacher_hidden, teacher_head_weight: of the teacher, of the same vocabulary.
        beta: the teacher's share of m, in (0, 1); only for "jsd".
        teacher_soft_cap: the same for the teacher's logits.

    >>> one, student, teacher = torch.ones(1, 1, 1), torch.tensor([[0.75], [0.25]]), torch.tensor([[0.5], [0.5]])
    >>> fused_full_kl(one, student.log(), one, teacher.log(), torch.tensor([[True]]))
    tensor([[0.1308]])
    """
    check_choice("divergence", divergence, Divergence)
    for of, states, weight in ("", hidden, head_weight), ("teacher_", teacher_hidden, teacher_head_weight):
        check_head(states, weight, None, temperature, soft_cap, of)
        check_tokens(response_mask, cu_seqlens, **{f"{of}hidden[..., 0]": states[..., 0]})
    check_above(0, ", or None for logits without a cap", teacher_soft_cap=teacher_soft_cap)
    if len(head_weight) != len(teacher_head_weight):
        sizes = f"{len(head_weight)} rows and teacher_head_weight {len(teacher_head_weight)}"
        raise ValueError(f"head_weight has {sizes}, expected one for each token of the same vocabulary")

    def measure(logits: Tensor, teacher_logits: Tensor) -> Tensor:
        capped = [(logits, soft_cap), (teacher_logits, teacher_soft_cap)]
        z, y = (x if cap is None else cap * torch.tanh(x / cap) for x, cap in capped)
        return divergence_of(z, y, divergence, beta=beta, temperature=temperature, vocab=vocab)

    teacher = teacher_hidden.detach(), teacher_head_weight.detach()
    (values,) = linear_divergence(hidden, head_weight, teacher, response_mask, measure, vocab)
    return values


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
