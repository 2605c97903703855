"""See :func:`sampled_reverse_kl`."""

from rlprims.losses._reinforce import reinforce
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


def sampled_reverse_kl(
    log_probs: PerToken,
    teacher_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """On-policy distillation, Agarwal et al. 2023 (arXiv:2306.13649), from the sampled token alone.

    :func:`reinforce` with A = teacher_log_probs − log_probs, a constant: loss = −A log π. A token that the teacher
    finds likelier than the student has A > 0 and is pushed up. For samples of the student its mean gradient is that of
    KL(student ‖ teacher) of the next token. Its value is no divergence: log :func:`kl` with k1 for that.

    Peers write the same as a reward, a penalty or an advantage, each with its sign: here A > 0 is towards the teacher.
    It credits a token with its own log-ratio and not with those that follow. For samples of an older policy give
    teacher_log_probs − old_log_probs as the advantages of ``clipped_surrogate`` or ``cispo``. Both log-probs are of one
    temperature, the sampler's.

    Args:
        log_probs: float (B, T) or (N,), student; the only gradient.
        teacher_log_probs: float, like log_probs: of the same tokens.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> x = torch.tensor([[-2.0]], requires_grad=True)
    >>> sampled_reverse_kl(x, torch.tensor([[-1.5]]), torch.tensor([[True]])).sum().backward()
    >>> x.grad  # a step against it raises the log-prob
    tensor([[-0.5000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    advantages = upcast(teacher_log_probs) - upcast(log_probs.detach())
    return reinforce(log_probs, advantages, response_mask, cu_seqlens)
