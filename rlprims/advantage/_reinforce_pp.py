"""See :func:`reinforce_pp`."""

from collections.abc import Callable

from torch import Tensor

from rlprims.advantage._returns import discounted_returns
from rlprims.advantage._whiten import whiten
from rlprims.types import CuSeqlens, PerToken, TokenMask


def reinforce_pp(
    rewards: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """REINFORCE++, Hu 2025 (arXiv:2501.03262), eq. 7: the reward-to-go, whitened over the batch.

    R_t = r_t + γ R_{t+1} over the valid tokens of each sequence, and A = (R − μ) / sqrt(σ² + ε) over all valid tokens
    of the batch: :func:`whiten` after :func:`discounted_returns`. The paper's reward has −β KL_t on every token and the
    score on the last; ``rewards`` are what ``rewards.kl_penalty`` made of them.

    Where sources disagree: credit is carried across masked tokens (tool output) as in verl 0.9 and OpenRLHF; SkyRL's
    return is multiplied by the mask, so what comes before a tool call earns nothing for what follows it. NeMo-RL takes
    the KL of a token off that token only and never off the ones before. ddof is 1 in verl and SkyRL, 0 in OpenRLHF and
    NeMo-RL.

    Args:
        rewards: float (B, T) or (N,), per token.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        gamma: discount per valid token.
        ddof: σ's divisor is N − ddof, N the valid tokens.
        eps: ε, in units of the reward squared.
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        float, like rewards; 0 outside the mask; all 0 if there are fewer than two valid tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> m = torch.tensor([[True, False, True], [True, True, False]])
    >>> reinforce_pp(torch.tensor([[0.0, 9.0, 1.0], [0.0, -1.0, 9.0]]), m)
    tensor([[ 0.8660,  0.0000,  0.8660],
            [-0.8660, -0.8660,  0.0000]])
    """
    returns = discounted_returns(rewards, response_mask, cu_seqlens, gamma=gamma)
    return whiten(returns, response_mask, cu_seqlens, ddof=ddof, eps=eps, all_reduce=all_reduce)
