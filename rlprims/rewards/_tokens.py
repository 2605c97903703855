"""Rewards of tokens: a response's score on its last token, a KL penalty, potentials, an implicit process reward."""

from rlprims._described import described
from rlprims.layout import last_token, to_tokens
from rlprims.masking import (
    check_above,
    check_choice,
    check_finite,
    check_range,
    check_sequences,
    check_tokens,
    upcast,
    zero_outside,
)
from rlprims.ratios import Estimator, estimate_kl
from rlprims.scan import next_values
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


@described
def at_last_token(scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Outcome reward: each response's score on the last token that the policy sampled, 0 elsewhere.

    For a response without a token all rewards are 0; verl and OpenRLHF write its score on the last column.

    >>> import torch
    >>> at_last_token(torch.tensor([2.0, 3.0]), torch.tensor([[True, True, False], [False, False, False]]))
    tensor([[0., 2., 0.],
            [0., 0., 0.]])
    """
    check_sequences(response_mask, cu_seqlens, scores=scores)
    return to_tokens(scores, last_token(response_mask, cu_seqlens), cu_seqlens)


@described
def kl_penalty(
    rewards: PerToken,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    kl_coef: float,
    estimator: Estimator = "k1",
) -> PerToken:
    """KL in the reward, Stiennon et al. 2020 (arXiv:2009.01325), section 3.4: r_t − β KL_t.

    The KL is that of the policy that sampled. It is part of the reward and has no gradient; with k1 its policy gradient
    is that of KL(π ‖ π_ref). ``controllers`` adapt β.

    Args:
        kl_coef: β, reward per nat.
        estimator: "k1", "k2", "k3" or "abs" of :func:`rlprims.ratios.estimate_kl`.

    >>> import torch
    >>> m = torch.tensor([[True, True]])
    >>> rewards, old, ref = torch.tensor([[[0.0, 1.0]], [[-1.0, -1.0]], [[-1.5, -1.0]]])
    >>> kl_penalty(rewards, old, ref, m, kl_coef=0.1)
    tensor([[-0.0500,  1.0000]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    check_choice("estimator", estimator, Estimator)
    check_finite(kl_coef=kl_coef)
    d = zero_outside(old_log_probs, response_mask) - zero_outside(ref_log_probs, response_mask)
    return zero_outside(rewards, response_mask) - kl_coef * estimate_kl(d, estimator).detach()


@described
def potential_shaping(
    potentials: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, gamma: float = 1.0
) -> PerToken:
    """Potential-based shaping, Ng, Harada and Russell 1999, to be added to the rewards: F_t = γ Φ_{t+1} − Φ_t.

    Φ_t is the value of the state before token t: a progress estimate, a process reward model. After the last token it
    is 0, so the discounted sum of F over a response is −Φ_0, the same for every response to a prompt: the best policy
    stays the same, and only the credit of the tokens changes. This does not hold for a potential added as a reward.
    Masked tokens are skipped: t+1 is the next token that the policy sampled.

    Args:
        potentials: Φ before each token.
        gamma: the discount of the returns that it is added to, in [0, 1].

    >>> import torch
    >>> m = torch.tensor([[True, False, True, True]])
    >>> potential_shaping(torch.tensor([[0.5, 9.0, 0.7, 0.9]]), m)
    tensor([[ 0.2000,  0.0000,  0.2000, -0.9000]])
    """
    check_tokens(response_mask, cu_seqlens, potentials=potentials)
    check_range(0, 1, gamma=gamma)
    next_potentials = next_values(potentials, response_mask, cu_seqlens=cu_seqlens)
    return zero_outside(gamma * next_potentials - upcast(potentials), response_mask)


@described
def implicit_process(
    process_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.05,
) -> PerToken:
    """Implicit process rewards, Yuan et al. 2024 (arXiv:2412.01981): log-ratios of two language models, by token.

    r_t = β (log π_φ,t − log π_ref,t) for a model φ that is trained on outcomes only, so that σ(Σ_t r_t) is the
    probability of a correct response: :func:`rlprims.losses.implicit_reward`. The sum up to a token is φ's expectation
    of the outcome there, and r_t the token's contribution. In PRIME (arXiv:2502.01456) φ learns from the rollouts of
    each step, and :func:`rlprims.advantage.prime` joins these rewards with the outcome.

    Args:
        process_log_probs: log π_φ of the sampled tokens; they get no gradient.
        ref_log_probs: of the model that φ was initialized from.
        beta: β > 0, reward per nat; that of the loss that trains φ. PRIME has 0.05.

    >>> import torch
    >>> phi, ref = torch.tensor([[[-1.0, -2.0, 7.0]], [[-2.0, -1.0, 9.0]]])
    >>> implicit_process(phi, ref, torch.tensor([[True, True, False]]))
    tensor([[ 0.0500, -0.0500,  0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, process_log_probs=process_log_probs, ref_log_probs=ref_log_probs)
    check_above(0, ": reward per nat", beta=beta)
    d = zero_outside(process_log_probs, response_mask) - zero_outside(ref_log_probs, response_mask)
    return beta * d.detach()
