"""Divergences from a reference or a teacher: over the whole vocabulary, or over K of its tokens and the rest.

A log-prob below −100 counts as −100 in the logarithms (``ratios.MIN_LOG_PROB``), so that banned tokens (logit −inf) are
legal on either side: they cost at most 100 nats, and their own logits get gradient 0.
"""

import math
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._sharding import check_vocab, max_over, normalizer, sum_of_terms
from rlprims.masking import check_choice, check_placements, check_temperature, check_tokens, zero_outside
from rlprims.ratios import MIN_LOG_PROB
from rlprims.types import CuSeqlens, PerToken, PerTokenLogits, TokenMask, VocabShard, token_wise

Direction: TypeAlias = Literal["reverse", "forward"]


@token_wise
def full_kl(
    logits: PerTokenLogits,
    ref_logits: PerTokenLogits,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    direction: Direction = "reverse",
    temperature: float = 1.0,
    vocab: VocabShard | None = None,
) -> PerToken:
    """KL between two next-token distributions, exact: the sum over the vocabulary, and nothing is sampled.

    With π = softmax(logits / temperature) and q the same of ref_logits, a reference policy or a teacher: "reverse" is
    KL(π ‖ q) = Σ_j π_j log(π_j / q_j), which seeks a mode of q and is what :func:`kl` estimates; "forward" is
    KL(q ‖ π), which covers all of q, the cross-entropy of distillation less a constant.

    Both softmaxes are computed in float32 whatever the dtype of the logits. Distillation texts that multiply by
    temperature² do it outside.

    Args:
        logits: float (B, T, V) or (N, V), current policy; the only gradient.
        ref_logits: float, like logits: frozen reference or teacher, of the same vocabulary.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed; not read.
        direction: "reverse" or "forward".
        temperature: above 0, of both.
        vocab: where both logits are this rank's columns of the vocabulary; see :class:`rlprims.types.VocabShard`.

    Returns:
        float32 (or float64 if given) in nats, (B, T) or (N,); 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown direction; temperature <= 0.

    >>> p, q = torch.tensor([[[0.75, 0.25]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
    >>> full_kl(p, q, torch.tensor([[True]]))
    tensor([[0.1308]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_choice("direction", direction, Direction)
    _check_rows(response_mask, "V", logits=logits, ref_logits=ref_logits)
    check_temperature(temperature)
    check_vocab(vocab, logits.shape[-1])

    p, log_p = _probabilities(logits, response_mask, temperature, vocab)
    q, log_q = _probabilities(ref_logits.detach(), response_mask, temperature, vocab)
    if direction == "reverse":
        terms = p * (log_p - log_q)
        slopes = terms + p
    else:
        terms = q * (log_q - log_p)
        slopes = torch.where(log_p > MIN_LOG_PROB, -q, 0.0)
    return zero_outside(sum_of_terms(vocab, terms, slopes, p), response_mask)


@token_wise
def jsd(
    logits: PerTokenLogits,
    teacher_logits: PerTokenLogits,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    vocab: VocabShard | None = None,
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
        cu_seqlens: int (B+1,) if packed; not read.
        beta: between 0 and 1: the teacher's share of m.
        temperature: above 0, of both.
        vocab: where both logits are this rank's columns of the vocabulary; see :class:`rlprims.types.VocabShard`.

    Returns:
        float32 (or float64 if given) in nats, (B, T) or (N,); 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta not between 0 and 1; temperature <= 0.

    >>> p, q = torch.tensor([[[0.75, 0.25]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
    >>> jsd(p, q, torch.tensor([[True]]))  # log 2 less the entropy of (¾, ¼)
    tensor([[0.1308]])
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta={beta}, expected a number between 0 and 1; for the ends use full_kl, forward (0) or reverse (1)"
        )
    check_tokens(response_mask, cu_seqlens)
    _check_rows(response_mask, "V", logits=logits, teacher_logits=teacher_logits)
    check_temperature(temperature)
    check_vocab(vocab, logits.shape[-1])

    p, log_p = _probabilities(logits, response_mask, temperature, vocab)
    q, log_q = _probabilities(teacher_logits.detach(), response_mask, temperature, vocab)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    slopes = (1 - beta) * p * (log_p - log_m)
    terms = beta * q * (log_q - log_m) + slopes
    return zero_outside(sum_of_terms(vocab, terms, slopes, p), response_mask)


@token_wise
def topk_kl(
    topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    teacher_topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    direction: Direction = "forward",
) -> PerToken:
    """KL between student and teacher from K tokens of the vocabulary, and all the others as one more event.

    With p and q the student's and the teacher's probabilities of the K tokens, and p_0 = 1 − Σ p, q_0 = 1 − Σ q for the
    rest: "forward" is Σ_{j=0..K} q_j log(q_j / p_j), "reverse" the same with p and q exchanged. It is exactly the KL of
    two distributions of K + 1 events: at least 0, 0 only where all K agree, never more than that of the whole
    vocabulary (:func:`full_kl`), and equal to it at K = V.

    The K tokens are any whose log-probs are known of both, usually the teacher's likeliest. Their log-probs are those
    of the whole softmax, ``logits.log_softmax(-1).gather(-1, ids)``, not renormalized over the K. verl leaves the rest
    out: that is no divergence, it can fall below 0 and is not least at p = q. TRL leaves it out after renormalizing,
    unless asked for the tail.

    Args:
        topk_log_probs: float (B, T, K) or (N, K), student; the only gradient.
        teacher_topk_log_probs: float, like topk_log_probs: of the same tokens.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed; not read.
        direction: "forward", from the teacher; or "reverse", from the student.

    Returns:
        float in nats, (B, T) or (N,); 0 outside the mask. The rest counts as at least the rounding of 1 (1.2e-7 in
        float32), so that it is finite.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown direction.

    >>> student, teacher = torch.tensor([[[0.2]]]).log(), torch.tensor([[[0.6]]]).log()
    >>> topk_kl(student, teacher, torch.tensor([[True]]))  # 0.6 log 3 + 0.4 log ½
    tensor([[0.3819]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_choice("direction", direction, Direction)
    _check_rows(response_mask, "K", topk_log_probs=topk_log_probs, teacher_topk_log_probs=teacher_topk_log_probs)

    log_p = _with_rest(topk_log_probs, response_mask)
    log_q = _with_rest(teacher_topk_log_probs.detach(), response_mask)
    terms = log_q.exp() * (log_q - log_p) if direction == "forward" else log_p.exp() * (log_p - log_q)
    return zero_outside(terms.sum(-1), response_mask)


@token_wise
def topk_jsd(
    topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    teacher_topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.5,
) -> PerToken:
    """:func:`jsd` from K tokens of the vocabulary, and all the others as one more event: SDPO (arXiv:2601.20802).

    With p and q the student's and the teacher's probabilities of the K tokens and of the rest together, and
    m = β q + (1 − β) p: D = β KL(q ‖ m) + (1 − β) KL(p ‖ m), each a sum over K + 1 events. It is at least 0, 0 only
    where all K agree, never more than that of the whole vocabulary, and equal to it at K = V.

    The K tokens are any whose log-probs are known of both, of the whole softmax as in :func:`topk_kl`, which is also
    what TRL means by α = 0 (forward) and α = 1 (reverse); its α between is this β. TRL renormalizes over the K unless
    asked for the tail: then the loss does not see how much probability the two give to the K together.

    Args:
        topk_log_probs: float (B, T, K) or (N, K), student; the only gradient.
        teacher_topk_log_probs: float, like topk_log_probs: of the same tokens.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed; not read.
        beta: between 0 and 1: the teacher's share of m.

    Returns:
        float in nats, (B, T) or (N,), at most log 2; 0 outside the mask. The rest counts as at least the rounding of 1
        (1.2e-7 in float32), so that it is finite.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta not between 0 and 1.

    >>> student, teacher = torch.tensor([[[0.75]]]).log(), torch.tensor([[[0.25]]]).log()
    >>> topk_jsd(student, teacher, torch.tensor([[True]]))  # log 2 less the entropy of (¾, ¼)
    tensor([[0.1308]])
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta={beta}, expected a number between 0 and 1; for the ends use topk_kl, forward (0) or reverse (1)"
        )
    check_tokens(response_mask, cu_seqlens)
    _check_rows(response_mask, "K", topk_log_probs=topk_log_probs, teacher_topk_log_probs=teacher_topk_log_probs)

    log_p = _with_rest(topk_log_probs, response_mask)
    log_q = _with_rest(teacher_topk_log_probs.detach(), response_mask)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    terms = beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)
    return zero_outside(terms.sum(-1), response_mask)


def _check_rows(mask: TokenMask, size: str, **rows: Tensor) -> None:
    """Raise ``ValueError`` unless both tensors are floats of one shape, a row for each token of the mask."""
    (_, first), _ = rows.items()
    if any(x.shape[:-1] != mask.shape or x.shape != first.shape for x in rows.values()):
        shapes = " and ".join(f"{name} has shape {tuple(x.shape)}" for name, x in rows.items())
        expected = f"({', '.join(map(str, mask.shape))}, {size})"
        raise ValueError(f"{shapes}, expected both {expected}: a row for each token of response_mask")
    check_placements(first.dim() - 2, **rows)
    for name, x in rows.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}, expected floats")


def _probabilities(
    logits: PerTokenLogits, mask: TokenMask, temperature: float, vocab: VocabShard | None
) -> tuple[Tensor, Tensor]:
    """softmax(logits / temperature), and its logarithm, at least −100; masked rows count as rows of zeros."""
    logits = zero_outside(logits, mask.unsqueeze(-1)) / temperature
    # not torch.log_softmax, which in float32 on a CPU is off by 5e-6 at V = 50,000
    logits = logits - max_over(vocab, logits.amax(-1, keepdim=True).detach())
    log_p = logits - normalizer(vocab, logits).log()
    return log_p.exp(), log_p.clamp(min=MIN_LOG_PROB)


def _with_rest(log_probs: Tensor, mask: TokenMask) -> Tensor:
    """(..., K) to (..., K + 1): the log-prob of all other tokens together comes last."""
    log_probs = zero_outside(log_probs, mask.unsqueeze(-1)).clamp(min=MIN_LOG_PROB)
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(log_probs.dtype).eps)
    return torch.cat([log_probs, rest.log()], dim=-1)
