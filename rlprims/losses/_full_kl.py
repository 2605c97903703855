"""See :func:`full_kl` and :func:`jsd`."""

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.masking import check_tokens, upcast, zero_outside
from rlprims.softmax import LEAST_LOG_PROB, check_logits, log_softmax, row_blocks
from rlprims.types import CuSeqlens, PerToken, PerTokenLogits, TokenMask

Direction: TypeAlias = Literal["reverse", "forward"]


def full_kl(
    logits: PerTokenLogits,
    ref_logits: PerTokenLogits,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    direction: Direction = "reverse",
    temperature: float = 1.0,
) -> PerToken:
    """KL between two next-token distributions, exact: the sum over the vocabulary, and nothing is sampled.

    With π = softmax(logits / temperature) and q the same of ref_logits, a reference policy or a teacher: "reverse" is
    KL(π ‖ q) = Σ_j π_j log(π_j / q_j), which seeks a mode of q and is what :func:`kl` estimates; "forward" is
    KL(q ‖ π), which covers all of q, the cross-entropy of distillation less a constant.

    What is kept for backward is the logits; a softmax is made for a block of rows at a time, in float32 whatever their
    dtype. Log-probs below −100 count as −100, so banned tokens (logit −inf) are legal on either side and cost at most
    100 nats. The gradient is first order. Distillation texts that multiply by temperature² do it outside.

    Args:
        logits: float (B, T, V) or (N, V), current policy; the only gradient.
        ref_logits: float, like logits: frozen reference or teacher, of the same vocabulary.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        direction: "reverse" or "forward".
        temperature: above 0, of both.

    Returns:
        float32 (or float64 if given) in nats, (B, T) or (N,); 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown direction; temperature <= 0.

    >>> p, q = torch.tensor([[[0.75, 0.25]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
    >>> full_kl(p, q, torch.tensor([[True]]))
    tensor([[0.1308]])
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"unknown direction {direction!r}: choose 'reverse' or 'forward'")
    _check(response_mask, cu_seqlens, temperature, logits=logits, ref_logits=ref_logits)
    return _divergence(logits, ref_logits, response_mask, 1.0 if direction == "reverse" else 0.0, temperature)


def jsd(
    logits: PerTokenLogits,
    teacher_logits: PerTokenLogits,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> PerToken:
    """Generalized Jensen-Shannon divergence, Agarwal et al. 2023 (arXiv:2306.13649), eq. 1, over the whole vocabulary.

    With the teacher q, the student π and m = β q + (1 − β) π: D = β KL(q ‖ m) + (1 − β) KL(π ‖ m). It is at most log 2,
    and β = ½ is the symmetric one.

    For small β, D / β is the forward KL(q ‖ π); for β near 1, D / (1 − β) is the reverse KL(π ‖ q). D itself goes to 0
    at both ends, so the ends are not taken: :func:`full_kl` is what TRL means by β = 0 (forward) and β = 1 (reverse).

    Args:
        logits: float (B, T, V) or (N, V), student; the only gradient.
        teacher_logits: float, like logits, of the same vocabulary.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        beta: between 0 and 1: the teacher's share of m.
        temperature: above 0, of both.

    Returns:
        float32 (or float64 if given) in nats, (B, T) or (N,); 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta not between 0 and 1; temperature <= 0.

    >>> p, q = torch.tensor([[[0.75, 0.25]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
    >>> jsd(p, q, torch.tensor([[True]]))  # log 2 less the entropy of (¾, ¼)
    tensor([[0.1308]])
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must be between 0 and 1; for the ends use full_kl, forward (0) or reverse (1)")
    _check(response_mask, cu_seqlens, temperature, logits=logits, teacher_logits=teacher_logits)
    return _divergence(logits, teacher_logits, response_mask, beta, temperature)


def _check(mask: Tensor, cu_seqlens: Tensor | None, temperature: float, **both: Tensor) -> None:
    check_tokens(mask, cu_seqlens)
    (name, logits), (other_name, other) = both.items()
    if logits.shape[:-1] != mask.shape or other.shape != logits.shape:
        raise ValueError(
            f"{name} has shape {tuple(logits.shape)} and {other_name} {tuple(other.shape)}, "
            f"both need {(*mask.shape, 'V')}: a row of logits for each token of response_mask"
        )
    for x in both.values():
        check_logits(x, temperature)


def _divergence(logits: Tensor, other: Tensor, mask: Tensor, beta: float, temperature: float) -> Tensor:
    vocabulary = logits.shape[-1]
    rows: Tensor = _Divergence.apply(
        logits.reshape(-1, vocabulary), other.reshape(-1, vocabulary).detach(), beta, temperature
    )
    return zero_outside(rows.reshape(mask.shape), mask)


class _Divergence(torch.autograd.Function):
    """Keeps the logits alone for backward: each block's softmax is made again, not stored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, other: Tensor, beta: float, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, other)
        ctx.beta, ctx.temperature = beta, temperature
        divergence = upcast(logits.new_empty(len(logits)))
        for rows in row_blocks(logits):
            terms, _ = _terms(log_softmax(logits[rows], temperature), log_softmax(other[rows], temperature), beta)
            divergence[rows] = terms.sum(-1)
        return divergence

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, other = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in row_blocks(logits):
            log_p = log_softmax(logits[rows], ctx.temperature)
            _, slopes = _terms(log_p, log_softmax(other[rows], ctx.temperature), ctx.beta)
            # d D / d z_j = (slope_j − p_j Σ slopes) / temperature
            g = grad[rows, None] / ctx.temperature
            block = (slopes - log_p.exp() * slopes.sum(-1, keepdim=True)) * g
            # A row that no loss reads gets exactly 0, whatever stands in it.
            grad_logits[rows] = torch.where(g == 0, 0.0, block).to(logits.dtype)
        return grad_logits, None, None, None


def _terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The terms whose sum is D(p, q), and p_j ∂D/∂p_j up to a multiple of p; forward KL at β = 0, reverse at 1."""
    p, q = log_p.exp(), log_q.exp()
    kept = log_p >= LEAST_LOG_PROB
    log_p, log_q = log_p.clamp(min=LEAST_LOG_PROB), log_q.clamp(min=LEAST_LOG_PROB)
    if beta == 0:
        return q * (log_q - log_p), torch.where(kept, -q, 0.0)
    if beta == 1:
        terms = p * (log_p - log_q)
        return terms, terms
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    of_p = (1 - beta) * p * (log_p - log_m)
    return beta * q * (log_q - log_m) + of_p, of_p
