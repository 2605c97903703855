"""Presets that learn from a teacher: another model, or the policy itself with more in its prompt.

The run sets the teacher and its prompt: ``model.teacher``, ``model.teacher_follows``, ``data.teacher_template``.
Responses are scored as in other presets; :func:`opd`, :func:`mopd`, :func:`iw_opd`, :func:`opsd` and :func:`sdft` only
log the scores.
"""

from rlprims import advantage, corrections, losses
from rlprims.algorithms._algorithm import Algorithm, LossTerm, Support
from rlprims.algorithms._use import Use, use


def opd(*, discount: float = 0.0) -> Algorithm:
    """On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649): the student samples, a teacher scores each token.

    A token's advantage is log π_T − log π, as in the Thinking Machines write-up of 2025, so that the mean gradient is
    that of the reverse KL. A discount above 0 also makes a token answer for the gaps of those that follow. Several
    updates per batch want ``policy_loss=losses.clipped_surrogate`` or ``cispo``.
    """
    return Algorithm(
        name="opd", advantage=use(advantage.teacher_gap, discount=discount), policy_loss=use(losses.reinforce)
    )


def mopd() -> Algorithm:
    """MOPD (MiMo-V2 2026, arXiv:2601.02780), eq. 8: distillation from several teachers, each for its own domain.

    ``model.teacher`` is a mapping, and ``data.teacher`` the field that names each row's. Tokens on which sampler and
    trainer disagree too much are left out, by IcePop's bounds, as in NeMo-RL. The paper may add the advantages of an
    outcome reward (eq. 9): give another preset a term of ``losses.sampled_reverse_kl`` for that.
    """
    return opd().replace(name="mopd", corrections=(use(corrections.icepop),))


def iw_opd(*, gamma: float = 0.5) -> Algorithm:
    """IW-OPD (arXiv:2606.22600): distillation in which the early gaps of a response count for more, as in TRL."""
    return Algorithm(name="iw_opd", advantage=use(advantage.iw_opd, gamma=gamma), policy_loss=use(losses.reinforce))


def opsd(*, beta: float = 0.5, size: int = 100) -> Algorithm:
    """OPSD (Zhao et al. 2026, arXiv:2601.18734): the teacher is the policy at the start, shown the solution.

    ``data.teacher_template`` has a field with the solution in it. The loss is the Jensen-Shannon divergence of the
    next-token distributions along the student's own responses, over the teacher's ``size`` likeliest tokens and the
    rest together, which the authors have as an option; a ``size`` of the vocabulary is their whole divergence.
    """
    return Algorithm(
        name="opsd",
        advantage=_UNREAD,
        policy_loss=use(losses.topk_jsd, beta=beta),
        support=Support(size=size, of="teacher"),
    )


def sdft(*, beta: float = 0.5, size: int = 100) -> Algorithm:
    """SDFT (Shenfeld et al. 2026, arXiv:2601.19897): the teacher is the policy, shown a demonstration.

    ``data.teacher_template`` has a field with the demonstration in it. Sources disagree about the rest. The divergence
    here is TRL's default, over the student's likeliest tokens, and its teacher is frozen; TRL leaves the tail out.
    ms-swift names the reverse KL as the paper's, and a moving average as its teacher: ``policy_loss=losses.topk_kl``
    with ``direction="reverse"``, and ``model.teacher_follows: {rate: 0.01}``.
    """
    return opsd(beta=beta, size=size).replace(name="sdft", support={"of": "student"})


def sdpo(*, beta: float = 0.5, size: int = 100) -> Algorithm:
    """SDPO (Hübotter et al. 2026, arXiv:2601.20802): the teacher is the policy, shown what went right or wrong.

    ``data.teacher_template`` has ``{sibling}`` in it, another response of the group that was right, or a field with
    feedback; rows for which there is none (``teacher_mask``) have no loss. Divergence and size are those of the
    authors' code, whose teacher is ``model.teacher_follows: {rate: 0.05}``, and which also weighs by the ratio to the
    old policy, at most 2: with one update per batch that is 1. ``policy_coefficient`` above 0 adds a policy
    gradient to it.
    """
    taught = LossTerm(
        coefficient=1.0,
        loss=use(losses.topk_jsd, beta=beta),
        mask="teacher_mask",
        aggregation=use(losses.token_mean),
        over="term",
    )
    return Algorithm(
        name="sdpo",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=use(losses.reinforce),
        policy_coefficient=0.0,
        loss_terms=(taught,),
        support=Support(size=size, of="student"),
    )


def rlsd(*, mix: float = 0.5, clip: float = 0.2) -> Algorithm:
    """RLSD (Yang et al. 2026, arXiv:2604.03128): GRPO, in which a teacher with a hint says how far each token moves.

    Rewards alone decide the sign. ``data.teacher_template`` shows the answer; the teacher may follow the policy.
    """
    return Algorithm(
        name="rlsd",
        group_size=8,
        advantage=use(advantage.grpo),
        normalization=use(advantage.rlsd, mix=mix, clip=clip),
        policy_loss=use(losses.clipped_surrogate),
    )


def sdar(*, coefficient: float = 0.1, beta: float = 5.0) -> Algorithm:
    """SDAR (Lu et al. 2026, arXiv:2605.15155): GRPO, and the likelihood of tokens that a teacher with a hint approves.

    The second term is ``coefficient`` times the mean of ``losses.sdar``; the number is that of the authors' code.
    """
    return Algorithm(
        name="sdar",
        group_size=8,
        advantage=use(advantage.grpo),
        loss_terms=(LossTerm(coefficient=coefficient, loss=use(losses.sdar, beta=beta)),),
    )


_UNREAD: Use = use(advantage.discounted_returns)
"""An algorithm has an advantage; no loss of these reads it."""
