"""Presets that also learn from tokens of others: tool output, expert responses, demonstrations."""

from rlprims import advantage, losses
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use


def echo(*, observation_coef: float = 0.1) -> Algorithm:
    """ECHO (arXiv:2605.24517): GRPO on the policy's tokens plus the likelihood of the environment's tokens.

    Rollouts that all fail still have tool output to learn from. The second term is λ = ``observation_coef`` times the
    mean of −log π over the tokens of ``observation_mask``, which ``turns.to_batch`` computes. Each mean is over its own
    tokens, so longer tool output does not make the policy gradient smaller. λ is prime-rl's; its mask does not include
    tokens of the chat template and warnings.
    """
    observations = LossTerm(
        coefficient=observation_coef,
        loss=losses.nll,
        mask="observation_mask",
        aggregation=losses.token_mean,
        over="term",
    )
    return Algorithm(name="echo", group_size=8, advantage=advantage.grpo, loss_terms=(observations,))


def luffy(*, gamma: float = 0.1, max_length: int = 8192) -> Algorithm:
    """LUFFY (Yan et al. 2025, arXiv:2504.14945): groups of one expert response and seven responses of the policy.

    The baseline includes the expert's score, so the expert response has a large advantage if the policy fails. The loss
    of its tokens is −A π / (π + γ), whose gradient is largest for tokens that are unlikely under the policy. As in the
    authors' runs, advantages are not divided by the std, and the sum over a response is divided by the constant
    ``max_length``. ``expert_mask`` (B, T) is True on the expert's tokens of ``response_mask``.
    """
    return Algorithm(
        name="luffy",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.luffy, gamma=gamma),
        aggregation=use(losses.seq_mean_token_sum_norm, length=max_length),
    )


def chord(*, mu: float = 0.1) -> Algorithm:
    """CHORD-φ (Zhang et al. 2025, arXiv:2508.11408): (1 − μ) · GRPO + μ · a weighted likelihood of demonstrations.

    Demonstrations are separate rows, whose tokens are in ``expert_mask`` and not in ``response_mask``. The weight of a
    token is p (1 − p), which is small if p is near 0 or 1. Each of the two means is over its own tokens.
    For CHORD-μ, which lowers μ over the run, build a new algorithm for each step: ``chord(mu=...)``.
    """
    demonstrations = LossTerm(coefficient=mu, loss=losses.chord_phi, mask="expert_mask", over="term")
    return Algorithm(
        name="chord", group_size=8, advantage=advantage.grpo, policy_coefficient=1 - mu, loss_terms=(demonstrations,)
    )


def sft() -> Algorithm:
    """Supervised fine-tuning: the negative log-likelihood of every response, a mean over tokens.

    The advantages are returns, which the loss does not use. On samples of the policy that a filter or a
    ``token_selection`` of ``algorithms.is_correct`` keeps, it is rejection sampling. DFT (arXiv:2508.05629) is
    ``replace(policy_loss=losses.dft)``.
    """
    return Algorithm(name="sft", advantage=advantage.discounted_returns, policy_loss=losses.nll)
