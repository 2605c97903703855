"""Advantages for distillation, from the log-probs of a teacher and of the student for the sampled tokens."""

import torch

from rlprims._described import described
from rlprims.layout import expand_to_tokens, sequence_sum
from rlprims.masking import check_at_least, check_range, check_tokens, upcast, zero_outside
from rlprims.ratios import log_ratio
from rlprims.scan import discounted_sum
from rlprims.types import CuSeqlens, PerToken, SequenceShard, TokenMask


@described
def teacher_gap(
    teacher_log_probs: PerToken,
    old_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    discount: float = 0.0,
    shard: SequenceShard | None = None,
) -> PerToken:
    """On-policy distillation as an advantage, MOPD, MiMo-V2 2026 (arXiv:2601.02780), eq. 8: A_t = log π_T − log π.

    With g_t = teacher_log_probs − old_log_probs of the sampled token: A_t = Σ_{k>=t} discount^(k−t) g_k over the valid
    tokens, discount in [0, 1]. For samples of π the expected gradient of −A log π is that of KL(π ‖ π_T): of the next
    token at discount 0, and of the whole response at discount 1, where A_t also has the gaps of later tokens.

    This works only with the gap of the *sampled* token. A divergence over several tokens, such as
    :func:`rlprims.losses.topk_kl`, has expected gradient 0 as a part of the advantage: use it as a loss term.

    Args:
        teacher_log_probs: of the sampled tokens, at the sampler's temperature.

    >>> teacher, old = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -1.0]])
    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> teacher_gap(teacher, old, m), teacher_gap(teacher, old, m, discount=0.5)
    (tensor([[ 1., -2.]]), tensor([[ 0., -2.]]))
    """
    check_range(0, 1, discount=discount)
    check_tokens(response_mask, cu_seqlens, teacher_log_probs=teacher_log_probs, old_log_probs=old_log_probs)
    gap = (upcast(teacher_log_probs) - upcast(old_log_probs)).detach()
    return zero_outside(discounted_sum(gap, discount, response_mask, cu_seqlens, shard), response_mask)


@described
def iw_opd(
    teacher_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    gamma: float = 0.5,
    shard: SequenceShard | None = None,
) -> PerToken:
    """Information-weighted distillation, IW-OPD 2026 (arXiv:2606.22600): early gaps of a response have more weight.

    With g_t = teacher_log_probs − rollout_log_probs: A_t = w_t g_t, w_t = 1 + γ (1 − Σ_{k<t} |g_k| / Σ_k |g_k|). w
    falls from 1 + γ at the first token to 1 after the last gap; γ = 0 is :func:`teacher_gap`. The formula is TRL's.

    Args:
        gamma: γ, the additional weight of the first token; at least 0.

    >>> teacher, rollout = torch.tensor([[-1.0, -4.0]]), torch.tensor([[-2.0, -1.0]])
    >>> iw_opd(teacher, rollout, torch.ones(1, 2, dtype=torch.bool))  # 1.5 · 1 and (1 + ½ · ¾) · −3
    tensor([[ 1.5000, -4.1250]])
    """
    check_at_least(0, gamma=gamma)
    check_tokens(response_mask, cu_seqlens, teacher_log_probs=teacher_log_probs, rollout_log_probs=rollout_log_probs)
    gap = (upcast(teacher_log_probs) - upcast(rollout_log_probs)).detach()
    abs_gap = gap.abs()
    all_reduce_rows = None if shard is None else shard.all_reduce_rows
    sums = sequence_sum(abs_gap, response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    total = expand_to_tokens(sums, response_mask, cu_seqlens)
    remaining = discounted_sum(abs_gap, 1.0, response_mask, cu_seqlens, shard)  # Σ_{k>=t} |g_k|
    share = torch.where(total > 0, remaining / total.masked_fill(total == 0, 1.0), 1.0)
    return zero_outside((1 + gamma * share) * gap, response_mask)


@described
def rlsd(
    advantages: PerToken,
    teacher_log_probs: PerToken,
    old_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    mix: float = 0.5,
    clip: float = 0.2,
) -> PerToken:
    """RLSD, Yang et al. 2026 (arXiv:2604.03128): the reward gives the sign of A, a teacher with a hint scales it.

    With g = teacher_log_probs − old_log_probs: A (1 − λ + λ clip(exp(sign(A) g), 1 ± clip)), where λ is ``mix`` in [0,
    1], and ``clip`` in [0, 1). The factor is positive, so the sign of A stays. Use it after an estimator such as
    :func:`grpo`, in the place of a normalization. The authors' code, and ms-swift, lower λ to 0 over the run.

    >>> gap = torch.tensor([[1.0, -1.0]])
    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> rlsd(torch.ones(1, 2), gap, torch.zeros(1, 2), m), rlsd(-torch.ones(1, 2), gap, torch.zeros(1, 2), m)
    (tensor([[1.1000, 0.9000]]), tensor([[-0.9000, -1.1000]]))
    """
    if not 0 <= mix <= 1 or not 0 <= clip < 1:
        raise ValueError(f"mix={mix} and clip={clip}, expected mix in [0, 1] and clip in [0, 1)")
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    check_tokens(response_mask, cu_seqlens, teacher_log_probs=teacher_log_probs, old_log_probs=old_log_probs)
    a = zero_outside(advantages, response_mask)
    gap = log_ratio(teacher_log_probs.detach(), old_log_probs, response_mask)
    weights = (a.sign() * gap).exp().clamp(1 - clip, 1 + clip)
    return zero_outside(a * (1 - mix + mix * weights), response_mask)
