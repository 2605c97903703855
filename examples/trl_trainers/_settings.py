"""Comparison of a TRL configuration with an algorithm. A setting that contradicts the algorithm is an error.

A setting with TRL's default is ignored, except ``beta``, because it also decides whether TRL loads a reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from rlprims import advantage, corrections, filters, losses
from rlprims.algorithms import Algorithm, BoundFunction, LossTerm

Settings: TypeAlias = Mapping[str, tuple[Callable[[Algorithm, Any], Any], str]]
"""For each setting: the algorithm's value in TRL's terms (None if it has none), and the change that sets another."""


def contradictions(settings: Settings, algorithm: Algorithm, args: Any) -> list[str]:
    """A line for each setting that contradicts the algorithm."""
    defaults = {field.name: field.default for field in fields(args)}
    config = type(args).__name__
    problems = []
    for name, (algorithm_value, change) in settings.items():
        value = getattr(args, name, None)
        is_set = name == "beta" or (name in defaults and value != defaults[name])
        is_used = not name.startswith("vllm_") or (args.use_vllm and args.vllm_importance_sampling_correction)
        if not is_set or not is_used:
            continue
        expected = algorithm_value(algorithm, args)
        if value != expected:
            has = "has no such setting" if expected is None else f"has {expected!r}"
            fix = f"set {name}={expected!r}" if name == "beta" else f"leave {name} out of {config}"
            problems.append(f"{config}({name}={value!r}), and {algorithm.name} {has}: {fix}, or {change.format(value)}")
    return problems


def kl_coefficient(a: Algorithm, args: Any) -> float:
    """The coefficient of its KL to the reference; 1.0 if it reads the reference but has no single coefficient."""
    coefficients = [_number(term) for term in a.loss_terms if "ref_log_probs" in term.loss.needs]
    coefficients += [a.kl_in_reward.controller.hyperparameters["kl_coef"]] if a.kl_in_reward else []
    if "ref_log_probs" not in a.needs:
        return 0.0
    return coefficients[0] if len(coefficients) == 1 and coefficients[0] else 1.0


def _number(term: LossTerm) -> float:
    """The coefficient of a term. A controller is an error that was raised before."""
    return 0.0 if isinstance(term.coefficient, BoundFunction) else term.coefficient


_CLIPPED, _SEQUENCE = (losses.clipped_surrogate,), (losses.gspo, losses.gspo_token)
_LOSS_TYPES = {
    "grpo": ((*_CLIPPED, *_SEQUENCE), losses.seq_mean_token_mean),
    "dapo": (_CLIPPED, losses.token_mean),
    "dr_grpo": (_CLIPPED, losses.seq_mean_token_sum_norm),
    "luspo": (_SEQUENCE, losses.seq_mean_token_sum),
    "cispo": ((losses.cispo,), losses.token_mean),
    "sapo": ((losses.sapo,), losses.seq_mean_token_mean),
    "vespo": ((losses.vespo,), losses.token_mean),
}


def _loss_type(a: Algorithm, args: Any) -> str | None:
    names = [k for k, (fns, mean) in _LOSS_TYPES.items() if a.policy_loss.fn in fns and a.aggregation.fn is mean]
    if names == ["dr_grpo"] and a.aggregation.hyperparameters["length"] != args.max_completion_length:
        return None
    return names[0] if names else None


def _of_loss(name: str, preset: str = "") -> tuple[Callable[[Algorithm, Any], Any], str]:
    """A hyperparameter of the policy loss, and the change that sets another."""
    change = f"replace(policy_loss={{{{'{name}': {{!r}}}}}})" + f" of algorithms.{preset}()" * bool(preset)
    return lambda a, args: a.policy_loss.hyperparameters.get(name), change


def _upper_bound(a: Algorithm, args: Any) -> float | None:
    hyperparameters = a.policy_loss.hyperparameters
    bound: float | None = hyperparameters.get("w_max" if a.policy_loss.fn is losses.cispo else "clip_high")
    return bound


def _lower_bound(a: Algorithm, args: Any) -> float | None:
    """The lower bound. Without ``epsilon_high``, TRL's epsilon is both bounds: then both must be equal to it."""
    low: float | None = a.policy_loss.hyperparameters.get("clip_low")
    return _upper_bound(a, args) if low == args.epsilon and args.epsilon_high is None else low


def _scale(a: Algorithm, args: Any) -> str | None:
    hyperparameters = a.advantage.hyperparameters
    if "normalize_std" not in hyperparameters:
        return None
    return str(hyperparameters.get("std_over", "group")) if hyperparameters["normalize_std"] else "none"


def _level(a: Algorithm, args: Any) -> str:
    return "sequence" if a.policy_loss.fn in _SEQUENCE else "token"


def _objectives(a: Algorithm, args: Any) -> str:
    return "normalize_then_sum" if a.advantage.fn is advantage.gdpo else "sum_then_normalize"


def _entropy_quantile(a: Algorithm, args: Any) -> float | None:
    chosen = a.token_selection
    if chosen is None:
        return 1.0
    return float(chosen.hyperparameters["fraction"]) if chosen.fn is filters.high_entropy else None


def _opsm(a: Algorithm, args: Any) -> float | None:
    return next((part.hyperparameters["delta"] for part in a.corrections if part.fn is corrections.opsm), None)


def _entropy_coefficient(a: Algorithm, args: Any) -> float:
    return sum(_number(term) for term in a.loss_terms if term.loss.fn is losses.negative_entropy)


def _weighted(a: Algorithm, args: Any) -> bool | None:
    kinds = {term.loss.fn is losses.weighted_kl for term in a.loss_terms if "ref_log_probs" in term.loss.needs}
    return kinds.pop() if len(kinds) == 1 else None


def _weight(name: str) -> Callable[[Algorithm, Any], float | None]:
    """A bound of the only correction by weights."""

    def bound(a: Algorithm, args: Any) -> float | None:
        bounds = [part.hyperparameters.get(name) for part in a.corrections if "high" in part.hyperparameters]
        return bounds[0] if len(bounds) == 1 else None

    return bound


def _mode(a: Algorithm, args: Any) -> str | None:
    modes = {corrections.tis: "token_truncate", corrections.mis: "sequence_mask"}
    return next((modes.get(part.fn) for part in a.corrections if "high" in part.hyperparameters), None)


def _normalized(a: Algorithm, args: Any) -> bool:
    return a.normalization is not None and a.normalization.fn is advantage.whiten


_SHARED: Settings = {
    "beta": (kl_coefficient, "give its KL that coefficient, as algorithms.grpo(kl_coef={!r}) does"),
    "epsilon": (_lower_bound, "replace(policy_loss={{'clip_low': {0!r}, 'clip_high': {0!r}}})"),
    "epsilon_high": (_upper_bound, "replace(policy_loss={{'clip_high': {!r}}}), which is 'w_max' in cispo"),
}
GRPO: Settings = {
    **_SHARED,
    "delta": _of_loss("dual_clip"),
    "loss_type": (_loss_type, "take the preset {!r}, or replace(policy_loss=..., aggregation=...)"),
    "importance_sampling_level": (_level, "replace(policy_loss=losses.gspo)"),
    "scale_rewards": (_scale, "replace(advantage={{'normalize_std': ..., 'std_over': ...}}) for {!r}"),
    "multi_objective_aggregation": (_objectives, "take algorithms.gdpo(components=...)"),
    "top_entropy_quantile": (_entropy_quantile, "replace(token_selection=use(filters.high_entropy, fraction={!r}))"),
    "off_policy_mask_threshold": (_opsm, "replace(corrections=(use(corrections.opsm, delta={!r}),))"),
    "use_bias_correction_kl": (_weighted, "take losses.kl, without the ratio, in its loss term"),
    "entropy_coef": (_entropy_coefficient, "add LossTerm(coefficient={!r}, loss=use(losses.negative_entropy))"),
    "use_adaptive_entropy": (lambda a, args: None, "take a fixed entropy_coef"),
    **{f"sapo_temperature_{side}": _of_loss(f"tau_{side}", "sapo") for side in ("pos", "neg")},
    **{f"vespo_{name}": _of_loss(name, "vespo") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "vllm_importance_sampling_mode": (_mode, "replace(corrections=...) by what {!r} is"),
    "vllm_importance_sampling_clip_max": (_weight("high"), "replace(corrections=(use(corrections.tis, high={!r}),))"),
    "vllm_importance_sampling_clip_min": (_weight("low"), "replace(corrections=...) with low={!r}"),
}
RLOO: Settings = {
    **_SHARED,
    "beta": (kl_coefficient, "replace(kl_in_reward=KLInReward(controller=use(controllers.FixedKL, kl_coef={!r})))"),
    "normalize_advantages": (_normalized, "replace(normalization=advantage.whiten)"),
    "reward_clip_range": (lambda a, args: None, "clip in the reward function"),
}
