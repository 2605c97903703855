"""Registration of estimators, losses and rewards of this library with verl."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlprims import advantage, losses
from rlprims._extras import package
from rlprims.algorithms import Algorithm, BoundFunction, use
from rlprims.interop.verl import _estimators, _losses
from rlprims.interop.verl._rewards import manager


class Installed(NamedTuple):
    """The names that were registered with verl."""

    estimators: tuple[str, ...]
    policy_losses: tuple[str, ...]
    reward_managers: tuple[str, ...]
    left_out: dict[str, str]
    """The functions of this library that cannot be registered, each with the reason."""


def install(*algorithms: Algorithm) -> Installed:
    """Register with verl every estimator and policy loss, as ``rlprims/<name>``, and the reward manager ``rlprims``.

    Hyperparameters are taken from verl's configuration if it has the setting (``algorithm.gamma``,
    ``actor.clip_ratio_low``, ...), otherwise they have the defaults of this library. ``algorithms`` are registered too,
    as ``rlprims/algorithms/<name>``, with their own hyperparameters: the advantage for ``algorithm.adv_estimator``, the
    loss for ``actor_rollout_ref.actor.policy_loss.loss_mode``. A second call replaces the registrations of the first.

    verl's Ray workers are separate processes. In each of them verl imports :mod:`rlprims.interop.verl.plugin`, by its
    entry point. For your own algorithms, write a module that calls this function, and name it in
    ``VERL_USE_EXTERNAL_MODULES``.

    Raises:
        ImportError: verl or a package that it needs is not installed.
        ValueError: an algorithm reads data that verl does not pass.
    """
    left_out: dict[str, str] = {}
    estimators = {f"rlprims/{name}": _estimators.estimator(part) for name, part in _parts(_ESTIMATORS, left_out)}
    policy_losses = {f"rlprims/{name}": _losses.policy_loss(part) for name, part in _parts(_LOSSES, left_out)}
    for algorithm in algorithms:
        _check(algorithm)
        name = f"rlprims/algorithms/{algorithm.name}"
        estimators[name] = _estimators.estimator(algorithm.advantage, algorithm.normalization, settings={})
        policy_losses[name] = _losses.policy_loss(algorithm.policy_loss, algorithm.aggregation, settings={})

    core = package("verl.trainer.ppo.core_algos", "verl", "install")
    managers = package("verl.experimental.reward_loop.reward_manager", "verl", "install")
    for name, estimator in estimators.items():
        core.ADV_ESTIMATOR_REGISTRY.pop(name, None)  # verl raises an error on a second registration
        core.register_adv_est(name)(estimator)
    for name, policy_loss in policy_losses.items():
        core.register_policy_loss(name)(policy_loss)
    if "rlprims" not in managers.registry.REWARD_MANAGER:
        managers.register("rlprims")(manager(managers.get_reward_manager_cls("naive")))
    return Installed(tuple(estimators), tuple(policy_losses), ("rlprims",), left_out)


class _Kind(NamedTuple):
    module: Any
    is_one: Callable[[BoundFunction], bool]
    needed: Callable[[BoundFunction], frozenset[str]]
    available: frozenset[str]
    alternatives: dict[str, str]


_ESTIMATORS = _Kind(
    advantage,
    lambda part: "response_mask" in part.needs and "advantages" not in part.needs,
    lambda part: part.needs,
    _estimators.AVAILABLE,
    {
        "gae": "use verl's adv_estimator=gae, which is this one, whitened",
        "gdpo": "use verl's adv_estimator=gdpo, which is a dialect of it",
        "optimal_token_baseline": "use verl's adv_estimator=optimal_token_baseline, which is a variant of it",
        "pkpo": "use install(algorithms.pkpo(k=4))",
    },
)
_LOSSES = _Kind(
    losses,
    lambda part: {"log_probs", "advantages"} <= part.needs,
    _losses.needed,
    _losses.AVAILABLE,
    {"decoupled_ppo": "use clipped_surrogate with the weights of verl's rollout_correction.rollout_is"},
)


def _parts(kind: _Kind, left_out: dict[str, str]) -> Iterator[tuple[str, BoundFunction]]:
    """The functions of a kind that verl can call. The others are added to ``left_out``."""
    for name in kind.module.__all__:
        part = use(getattr(kind.module, name))
        if not kind.is_one(part):
            continue
        missing = sorted(kind.needed(part) - kind.available)
        if missing or part.unbound:
            reason = f"verl does not pass {', '.join(missing)}" if missing else f"needs {', '.join(part.unbound)}"
            left_out[name] = "; ".join([reason, *([kind.alternatives[name]] if name in kind.alternatives else [])])
        else:
            yield name, part


def _check(algorithm: Algorithm) -> None:
    problems = [
        f"{part.path} reads {', '.join(sorted(missing))}"
        for kind, part in ((_ESTIMATORS, algorithm.advantage), (_LOSSES, algorithm.policy_loss))
        if (missing := kind.needed(part) - kind.available)
    ]
    if "group_ids" in algorithm.aggregation.needs:
        problems.append(f"{algorithm.aggregation.path} reads group_ids")
    if algorithm.loss_terms:
        problems.append("loss_terms: set actor.use_kl_loss and actor.entropy_coeff in verl, and loss_terms=() here")
    if algorithm.policy_coefficient != 1:
        problems.append("policy_coefficient: without loss terms it only scales the learning rate; set 1 here")
    if algorithm.corrections:
        problems.append("corrections: set algorithm.rollout_correction in verl, and corrections=() here")
    if algorithm.baseline:
        problems.append(f"baseline: {algorithm.baseline.path} has a state, which verl does not save")
    if algorithm.token_selection:
        problems.append("token_selection: its thresholds are those of a whole update, which verl does not pass")
    if problems:
        raise ValueError(f"verl does not pass the data that {algorithm.name} needs: {'; '.join(problems)}")
