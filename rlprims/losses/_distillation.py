"""Divergences from a reference or a teacher: over the whole vocabulary, or over K of its tokens and the rest.

Log-probs are clamped to at least −100 (``ratios.MIN_LOG_PROB``), so that both distributions may have banned tokens
(logit −inf). A banned token adds at most 100 nats, and its logit gets gradient 0.
"""

from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims._divergence import divergence_of, divergence_terms
from rlprims.masking import check_choice, check_placements, check_tokens, zero_outside
from rlprims.ratios import MIN_LOG_PROB
from rlprims.types import CuSeqlens, PerToken, PerTokenLogits, TokenMask, VocabShard, token_wise

Direction: TypeAlias = Literal["reverse", "forward"]


@described
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
    """The exact KL between two next-token distributions, in nats: a sum over the whole vocabulary.

    With π = softmax(logits / temperature) and q = softmax(ref_logits / temperature), where q is a reference policy or a
    teacher: "reverse" is KL(π ‖ q) = Σ_j π_j log(π_j / q_j), the mode-seeking one, which :func:`kl` estimates.
    "forward" is KL(q ‖ π), the mass-covering one: the cross-entropy of distillation minus a constant. Both softmaxes
    are in float32 or more. For the factor temperature² of some papers, multiply the result by it.

    Args:
        logits: current policy; only it gets a gradient.
        ref_logits: frozen reference or teacher, of the same vocabulary.

    >>> p, q = torch.tensor([[[0.75, 0.25]]]).log(), torch.tensor([[[0.5, 0.5]]]).log()
    >>> full_kl(p, q, torch.tensor([[True]]))
    tensor([[0.1308]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_choice("direction", direction, Direction)
    _check_rows(response_mask, "V", logits=logits, ref_logits=ref_logits)
    z, y = (zero_outside(x, response_mask.unsqueeze(-1)) for x in (logits, ref_logits))
    return zero_outside(divergence_of(z, y, direction, temperature=temperature, vocab=vocab), response_mask)


@described
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

    With the teacher q, the student π and m = β q + (1 − β) π: D = β KL(q ‖ m) + (1 − β) KL(π ‖ m), in nats, with the
    teacher's share β between 0 and 1. It is at most log 2, and symmetric for β = ½. For β → 0, D / β is the forward
    KL(q ‖ π); for β → 1, D / (1 − β) is the reverse KL(π ‖ q). For these TRL uses the KL: :func:`full_kl`.

    Args:
        logits: student; only it gets a gradient.
        teacher_logits: of the same vocabulary.
        beta: the teacher's share of m.

    >>> p, q = torch.tensor([[[0.75, 0.25]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
    >>> jsd(p, q, torch.tensor([[True]]))  # log 2 minus the entropy of (¾, ¼)
    tensor([[0.1308]])
    """
    check_tokens(response_mask, cu_seqlens)
    _check_rows(response_mask, "V", logits=logits, teacher_logits=teacher_logits)
    z, y = (zero_outside(x, response_mask.unsqueeze(-1)) for x in (logits, teacher_logits))
    return zero_outside(divergence_of(z, y, "jsd", beta=beta, temperature=temperature, vocab=vocab), response_mask)


@described
@token_wise
def topk_kl(
    topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    teacher_topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    direction: Direction = "forward",
) -> PerToken:
    """KL between student and teacher over K tokens of the vocabulary, with all other tokens as one more event.

    With p and q the student's and the teacher's probabilities of the K tokens, and p_0 = 1 − Σ p, q_0 = 1 − Σ q for the
    rest: "forward" is Σ_{j=0..K} q_j log(q_j / p_j), "reverse" the same with p and q exchanged. It is the KL of two
    distributions over K + 1 events: at least 0, 0 only if all K probabilities agree, at most the KL over the whole
    vocabulary (:func:`full_kl`), and equal to it for K = V.

    The K tokens may be any tokens, usually the teacher's most likely ones. Their log-probs are those of the whole
    softmax, ``logits.log_softmax(-1).gather(-1, ids)``, not renormalized over the K tokens. verl omits the rest; the
    result can be negative, and p = q is not its minimum. TRL renormalizes and omits the rest, unless its option for the
    tail is set. The result is in nats, and finite: the probability of the rest is at least the rounding error of 1.

    >>> student, teacher = torch.tensor([[[0.2]]]).log(), torch.tensor([[[0.6]]]).log()
    >>> topk_kl(student, teacher, torch.tensor([[True]]))  # 0.6 log 3 + 0.4 log ½
    tensor([[0.3819]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_choice("direction", direction, Direction)
    _check_rows(response_mask, "K", topk_log_probs=topk_log_probs, teacher_topk_log_probs=teacher_topk_log_probs)

    log_p = _with_rest(topk_log_probs, response_mask)
    log_q = _with_rest(teacher_topk_log_probs.detach(), response_mask)
    terms = divergence_terms(log_p.exp(), log_p, log_q.exp(), log_q, direction)
    return zero_outside(terms.sum(-1), response_mask)


@described
@token_wise
def topk_jsd(
    topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    teacher_topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.5,
) -> PerToken:
    """:func:`jsd` over K tokens of the vocabulary, with all other tokens as one more event: SDPO (arXiv:2601.20802).

    With p and q the student's and the teacher's probabilities of the K tokens and of the rest, and
    m = β q + (1 − β) p: D = β KL(q ‖ m) + (1 − β) KL(p ‖ m), each a sum over K + 1 events. The K tokens, their
    log-probs, the rest and the bounds are as in :func:`topk_kl`. For TRL's α = 0 (forward) and α = 1 (reverse) use
    :func:`topk_kl`; other values of its α are β here. TRL renormalizes over the K tokens, unless told otherwise.

    Args:
        beta: β, the teacher's share of m, in (0, 1).

    >>> student, teacher = torch.tensor([[[0.75]]]).log(), torch.tensor([[[0.25]]]).log()
    >>> topk_jsd(student, teacher, torch.tensor([[True]]))  # log 2 minus the entropy of (¾, ¼)
    tensor([[0.1308]])
    """
    check_tokens(response_mask, cu_seqlens)
    _check_rows(response_mask, "K", topk_log_probs=topk_log_probs, teacher_topk_log_probs=teacher_topk_log_probs)

    log_p = _with_rest(topk_log_probs, response_mask)
    log_q = _with_rest(teacher_topk_log_probs.detach(), response_mask)
    terms = divergence_terms(log_p.exp(), log_p, log_q.exp(), log_q, "jsd", beta)
    return zero_outside(terms.sum(-1), response_mask)


def _check_rows(mask: TokenMask, size: str, **rows: Tensor) -> None:
    """Raise ``ValueError`` unless both tensors are floats of the same shape, with a row for each token of the mask."""
    (_, first), _ = rows.items()
    if any(x.shape[:-1] != mask.shape or x.shape != first.shape for x in rows.values()):
        shapes = " and ".join(f"{name} has shape {tuple(x.shape)}" for name, x in rows.items())
        expected = f"({', '.join(map(str, mask.shape))}, {size})"
        raise ValueError(f"{shapes}, expected both {expected}: a row for each token of response_mask")
    check_placements(first.dim() - 2, **rows)
    for name, x in rows.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}, expected floats")


def _with_rest(log_probs: Tensor, mask: TokenMask) -> Tensor:
    """(..., K) to (..., K + 1): the last entry is the log-prob of all other tokens together."""
    log_probs = zero_outside(log_probs, mask.unsqueeze(-1)).clamp(min=MIN_LOG_PROB)
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(log_probs.dtype).eps)
    return torch.cat([log_probs, rest.log()], dim=-1)
