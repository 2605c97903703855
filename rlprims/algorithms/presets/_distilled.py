"""Presets with a teacher: another model, or the policy itself with additional text in its prompt.

The run sets the teacher and its prompt: ``model.teacher``, ``model.teacher_follows``, ``data.teacher_template``.
Responses are scored, but :func:`opd`, :func:`mopd`, :func:`iw_opd`, :func:`opsd` and :func:`sdft` only log the scores.
"""

from rlprims import advantage, corrections, losses
from rlprims.algorithms._algorithm import Algorithm, LossTerm, TeacherTopK
from rlprims.algorithms._use import use


def opd(*, discount: float = 0.0) -> Algorithm:
    """On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649): the student samples, a teacher scores each token.

    A token's advantage is log π_T − log π, as in the Thinking Machines article of 2025, so that the expected gradient
    is that of the reverse KL. With a discount above 0 the advantage includes the gaps of later tokens. For several
    updates per batch use ``policy_loss=losses.clipped_surrogate`` or ``cispo``.
    """
    return Algorithm(name="opd", advantage=use(advantage.teacher_gap, discount=discount), policy_loss=losses.reinforce)


def mopd() -> Algorithm:
    """MOPD (MiMo-V2 2026, arXiv:2601.02780), eq. 8: distillation from several teachers, each for its own domain.

    ``model.teacher`` is a mapping of teachers, and ``data.teacher`` the field with the name of each row's teacher.
    Tokens on which sampler and trainer disagree too much are dropped, with IcePop's bounds, as in NeMo-RL. To add the
    advantages of an outcome reward (eq. 9 of the paper), add a term of ``losses.sampled_reverse_kl`` to another preset.
    """
    return opd().replace(name="mopd", corrections=(corrections.icepop,))


def iw_opd(*, gamma: float = 0.5) -> Algorithm:
    """IW-OPD (arXiv:2606.22600): distillation in which early gaps of a response have more weight, as in TRL."""
    return Algorithm(name="iw_opd", advantage=use(advantage.iw_opd, gamma=gamma), policy_loss=losses.reinforce)


def opsd(*, beta: float = 0.5, size: int = 100) -> Algorithm:
    """OPSD (Zhao et al. 2026, arXiv:2601.18734): the teacher is the initial policy, with the solution in its prompt.

    ``data.teacher_template`` must contain a field with the solution. The loss is the Jensen-Shannon divergence of the
    next-token distributions along the student's own responses, over the teacher's ``size`` most likely tokens and the
    rest as one event, which is an option of the authors' code; it is theirs for ``size`` equal to the vocabulary.
    """
    support = TeacherTopK(size=size, of="teacher")
    return Algorithm(name="opsd", advantage=_UNREAD, policy_loss=use(losses.topk_jsd, beta=beta), support=support)


def sdft(*, beta: float = 0.5, size: int = 100) -> Algorithm:
    """SDFT (Shenfeld et al. 2026, arXiv:2601.19897): the teacher is the policy, with a demonstration in its prompt.

    ``data.teacher_template`` must contain a field with the demonstration. Where sources disagree: the divergence here
    is TRL's default, over the student's most likely tokens, with a frozen teacher; TRL omits the rest of the
    vocabulary. ms-swift gives the reverse KL as the paper's divergence, and a moving average as its teacher: for these
    use ``policy_loss=losses.topk_kl`` with ``direction="reverse"``, and ``model.teacher_follows: {rate: 0.01}``.
    """
    return opsd(beta=beta, size=size).replace(name="sdft", support={"of": "student"})


def sdpo(*, beta: float = 0.5, size: int = 100) -> Algorithm:
    """SDPO (Hübotter et al. 2026, arXiv:2601.20802): the teacher is the policy, with feedback in its prompt.

    ``data.teacher_template`` must contain ``{sibling}``, another, correct response of the group, or a field with
    feedback. Rows without one (``teacher_mask``) have no loss. Divergence and size are those of the authors' code. Its
    teacher is ``model.teacher_follows: {rate: 0.05}``, and it also multiplies by the ratio to the old policy, at most
    2, which is 1 with one update per batch. ``policy_coefficient`` above 0 adds a policy gradient.
    """
    loss = use(losses.topk_jsd, beta=beta)
    term = LossTerm(coefficient=1.0, loss=loss, mask="teacher_mask", aggregation=losses.token_mean, over="term")
    return Algorithm(
        name="sdpo",
        group_size=8,
        advantage=use(advantage.grpo, normalize_std=False),
        policy_loss=losses.reinforce,
        policy_coefficient=0.0,
        loss_terms=(term,),
        support=TeacherTopK(size=size, of="student"),
    )


def rlsd(*, mix: float = 0.5, clip: float = 0.2) -> Algorithm:
    """RLSD (Yang et al. 2026, arXiv:2604.03128): GRPO whose advantages a teacher with a hint scales per token.

    The sign of an advantage depends on the rewards only. ``data.teacher_template`` must contain the answer. The teacher
    may be a moving average of the policy (``model.teacher_follows``).
    """
    scaled = use(advantage.rlsd, mix=mix, clip=clip)
    return Algorithm(name="rlsd", group_size=8, advantage=advantage.grpo, normalization=scaled)


def sdar(*, coefficient: float = 0.1, beta: float = 5.0) -> Algorithm:
    """SDAR (Lu et al. 2026, arXiv:2605.15155): GRPO plus imitation of tokens to which a teacher with a hint gives more.

    The second term is ``coefficient`` times the mean of ``losses.sdar``; the default is that of the authors' code.
    """
    imitation = LossTerm(coefficient=coefficient, loss=use(losses.sdar, beta=beta))
    return Algorithm(name="sdar", group_size=8, advantage=advantage.grpo, loss_terms=(imitation,))


_UNREAD = advantage.discounted_returns
"""An algorithm must have an advantage. The losses of these presets do not use it."""
