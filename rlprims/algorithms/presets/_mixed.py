"""Presets that learn from more than the policy's own samples: tool output, expert responses, demonstrations."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use


def echo(*, observation_coef: float = 0.1) -> Algorithm:
    """ECHO (arXiv:2605.24517): GRPO on the policy's tokens, and the likelihood of the environment's tokens.

    Rollouts that all fail still contain tool output to learn from. The second term is λ = ``observation_coef`` times
    the mean of −log π over the tokens of ``observation_mask``, which ``turns.to_batch`` makes. Each mean is over its
    own tokens, so longer tool output does not make the policy gradient smaller. prime-rl, whose λ this is, leaves the
    tokens of the chat template and warnings out of the mask.
    """
    observed = LossTerm(
        coefficient=observation_coef,
        loss=use(losses.nll),
        mask="observation_mask",
        aggregation=use(losses.token_mean),
        over="term",
    )
    return Algorithm(name="echo", group_size=8, advantage=use(advantage.grpo), loss_terms=(observed,))


def luffy(*, gamma: float = 0.1, max_length: int = 8192) -> Algorithm:
    """LUFFY (Yan et al. 2025, arXiv:2504.14945): one response of a group is an expert's, seven are the policy's own.

    The expert's score is in the baseline, so that it leads where the policy fails. The loss of its tokens is
    −A π / (π + γ), whose gradient is largest where the policy finds them unlikely. As in the authors' runs the group's
    std does not divide, and the sum over a response is divided by the constant ``max_length``. ``expert_mask`` (B, T)
    says which tokens of ``response_mask`` are the expert's.
    """
    return Algorithm(
        name="luffy",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.luffy, gamma=gamma),
        aggregation=use(losses.seq_mean_token_sum_norm, length=max_length),
    )


def chord(*, mu: float = 0.1) -> Algorithm:
    """CHORD-φ (Zhang et al. 2025, arXiv:2508.11408): (1 − μ) of GRPO's loss and μ of a weighed likelihood of experts.

    Demonstrations are rows of their own, whose tokens are in ``expert_mask`` and not in ``response_mask``; a token
    weighs p (1 − p), little where p is near 0 or 1. Each of the two means is over its own tokens.
    For CHORD-μ, which lowers μ over the run, make the algorithm anew for each step: ``chord(mu=...)``.
    """
    demonstrated = LossTerm(coefficient=mu, loss=use(losses.chord_phi), mask="expert_mask", over="term")
    return Algorithm(
        name="chord",
        group_size=8,
        advantage=use(advantage.grpo),
        policy_coefficient=1 - mu,
        loss_terms=(demonstrated,),
    )


def sft() -> Algorithm:
    """Supervised fine-tuning: the negative log-likelihood of every response, a mean over tokens.

    Advantages are estimated, as returns, and no loss reads them. On the policy's own samples that a filter or a
    ``token_selection`` of ``algorithms.is_correct`` keeps it is rejection sampling. DFT (arXiv:2508.05629) is
    ``replace(policy_loss=losses.dft)``.
    """
    return Algorithm(name="sft", advantage=use(advantage.discounted_returns), policy_loss=use(losses.nll))
