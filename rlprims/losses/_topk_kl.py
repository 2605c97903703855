"""See :func:`topk_kl`."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from rlprims.masking import check_tokens, upcast, zero_outside
from rlprims.softmax import LEAST_LOG_PROB
from rlprims.types import CuSeqlens, PerToken, TokenMask


def topk_kl(
    topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    teacher_topk_log_probs: Annotated[Tensor, "float (B, T, K) or (N, K)"],
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    direction: Literal["forward", "reverse"] = "forward",
) -> PerToken:
    """KL between student and teacher from K tokens of the vocabulary, and all the others as one more event.

    With p and q the student's and the teacher's probabilities of the K tokens, and p_0 = 1 − Σ p, q_0 = 1 − Σ q for the
    rest: "forward" is Σ_{j=0..K} q_j log(q_j / p_j), "reverse" the same with p and q exchanged. It is exactly the KL of
    two distributions of K + 1 events: at least 0, 0 only where all K agree, never more than that of the whole
    vocabulary (:func:`full_kl`), and equal to it at K = V.

    The K tokens are any that both were asked about, usually the teacher's likeliest. Their log-probs are those of the
    whole softmax, ``logits.log_softmax(-1).gather(-1, ids)``, not renormalized over the K. verl leaves the rest out:
    that is no divergence, it can fall below 0 and is not least at p = q. TRL leaves it out after renormalizing, unless
    asked for the tail.

    Args:
        topk_log_probs: float (B, T, K) or (N, K), student; the only gradient.
        teacher_topk_log_probs: float, like topk_log_probs: of the same tokens.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
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
    if topk_log_probs.shape[:-1] != response_mask.shape or teacher_topk_log_probs.shape != topk_log_probs.shape:
        raise ValueError(
            f"topk_log_probs has shape {tuple(topk_log_probs.shape)} and teacher_topk_log_probs "
            f"{tuple(teacher_topk_log_probs.shape)}, both need {(*response_mask.shape, 'K')}"
        )
    p = _with_rest(topk_log_probs, response_mask)
    q = _with_rest(teacher_topk_log_probs, response_mask).detach()
    if direction == "forward":
        terms = q.exp() * (q - p)
    elif direction == "reverse":
        terms = p.exp() * (p - q)
    else:
        raise ValueError(f"unknown direction {direction!r}: choose 'forward' or 'reverse'")
    return zero_outside(terms.sum(-1), response_mask)


def _with_rest(log_probs: Tensor, mask: Tensor) -> Tensor:
    """(..., K) to (..., K + 1): the log-probability of every other token last."""
    # Outside the mask any number will do, but it must be finite: NaN times a gradient of 0 is NaN.
    kept = torch.where(mask[..., None], upcast(log_probs), 0.0).clamp(min=LEAST_LOG_PROB)
    rest = (1 - kept.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(kept.dtype).eps)
    return torch.cat([kept, rest.log()], dim=-1)
