"""Dialects: the settings with which a preset computes the numbers of another library.

Each entry changes the preset so that advantages and loss equal the library's. They still differ on some batches by
design: here a group of equal rewards gets exactly 0, log-ratios are clamped to ±20, KL estimates are not capped, and a
response without tokens has no loss. Filters, penalties and group sizes are not part of a dialect, except that they are
removed if the library has none. What cannot be reproduced here has no entry: NeMo-RL's GRPO divides by a leave-one-out
std, which can be 0, and verl's Clip-Cov does not draw the tokens that PPO clips. SkyRL's recorded numbers do not
determine its DPPO thresholds exactly. prime-rl's defaults of 2026-08-21 are DPPO and a KL term to the sampler; since
2026-09-18 (its pull requests 3418 and 3586) they are its "IPO" at 0.3, without that term.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeAlias

from rlprims import corrections, filters, losses
from rlprims.algorithms._adapters import kl_to_old, kl_to_sampler
from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import use

Dialect: TypeAlias = Literal[
    "verl-0.9",
    "trl-1.16",
    "openrlhf-0.11",
    "nemo-rl-2026.08",
    "skyrl-2026.08",
    "slime-2026.08",
    "areal-2026.05",
    "prime-rl-2026.08",
    "prime-rl-2026.09",
]
Changes: TypeAlias = Mapping[str, Any]
P = ParamSpec("P")

_VERL_RATIO: Changes = {
    "policy_loss": {"fn": losses.clipped_surrogate, "dual_clip": 3.0},
    "aggregation": losses.token_mean,
}
_VERL_GROUP: Changes = {"advantage": {"singleton": "raw"}}
_TRL_GROUP: Changes = {"advantage": {"eps": 1e-4}}
_SKYRL_GROUP: Changes = {"advantage": {"singleton": "raw"}, "aggregation": losses.token_mean}
_TRL_RLOO: Changes = {
    "policy_loss": use(losses.gspo, clip_low=0.2, clip_high=0.2, mean="product"),
    "aggregation": losses.seq_mean_token_mean,
}
_TOKEN_MEAN: Changes = {"aggregation": losses.token_mean}
_PPO_LOSS: Changes = {"policy_loss": losses.clipped_surrogate, "aggregation": losses.token_mean}
_NARROW_CISPO: Changes = {"policy_loss": {"w_min": 0.8, "w_max": 1.2}}
_AREAL_GROUP: Changes = {"advantage": {"eps": 1e-5}}
_AREAL_WEIGHTS = use(corrections.importance_weights, action="mask")
_VERL_KL_COV = LossTerm(coefficient=0.1, loss=kl_to_old, tokens=use(filters.kl_cov, fraction=2e-4))
_PRIME_GROUP: Changes = {"advantage": {"normalize_std": False}, **_TOKEN_MEAN}
_PRIME_DPPO: Changes = {
    "policy_loss": use(losses.dppo, threshold_low=0.2, threshold_high=0.2),
    "loss_terms": (LossTerm(coefficient=2e-3, loss=kl_to_sampler),),  # 1e-3 log²ρ, and k2 is half the square
}

_SEQUENCE_RATIO: Changes = {"clip_low": 0.2, "clip_high": 0.2}

_DIALECTS: Mapping[str, Mapping[str, Changes]] = {
    "verl-0.9": {
        "ppo": {**_VERL_RATIO, "value_loss": {"clip": 0.5}},
        "grpo": {**_VERL_GROUP, **_VERL_RATIO},
        "dr_grpo": {**_VERL_GROUP, "policy_loss": {"dual_clip": 3.0}},
        "dapo": {**_VERL_GROUP, "policy_loss": {"dual_clip": 3.0}},
        "rloo": _VERL_RATIO,
        "remax": _VERL_RATIO,
        "reinforce_pp": _VERL_RATIO,
        "reinforce_pp_baseline": {**_VERL_GROUP, **_VERL_RATIO},
        "opo": {**_VERL_GROUP, **_VERL_RATIO},
        "gpg": {"advantage": {"singleton": "raw", "informative": "nonzero_reward"}},
        "pass_at_k_training": {"advantage": {"normalize_std": True}, **_VERL_RATIO},
        "gdpo": {"advantage": {"singleton": "raw", "whiten_over": "tokens", "whiten_eps": 1e-8}, **_VERL_RATIO},
        "gspo": {**_VERL_GROUP, "policy_loss": losses.gspo_token},
        "cispo": {**_VERL_GROUP, **_NARROW_CISPO},
        "sapo": _VERL_GROUP,
        "gmpo": _VERL_GROUP,
        "kl_cov": {**_VERL_GROUP, "loss_terms": (_VERL_KL_COV,)},
    },
    "trl-1.16": {
        "grpo": _TRL_GROUP,
        "dr_grpo": {},
        "dapo": {**_TRL_GROUP, "filter": None},
        "lite_ppo": _TRL_GROUP,
        "gdpo": {"advantage": {"eps": 1e-4, "whiten_eps": 1e-4}, **_TOKEN_MEAN},
        "gspo": _TRL_GROUP,
        "luspo": _TRL_GROUP,
        "cispo": _TRL_GROUP,
        "sapo": _TRL_GROUP,
        "rloo": _TRL_RLOO,
    },
    "openrlhf-0.11": {
        "ppo": {"advantage": {"lam": 1.0}, "normalization": {"ddof": 0}, "value_loss": {"clip": 0.5}},
        "grpo": {"advantage": {"eps": 1e-9}, **_TOKEN_MEAN},
        "dr_grpo": _TOKEN_MEAN,
        "rloo": _PPO_LOSS,
        "reinforce_pp": {"advantage": {"ddof": 0}},
        "reinforce_pp_baseline": {"advantage": {"ddof": 0}},
    },
    "nemo-rl-2026.08": {"dapo": {}, "vapo": {}, "gspo": {"policy_loss": _SEQUENCE_RATIO}, "cispo": _NARROW_CISPO},
    "skyrl-2026.08": {
        "grpo": _SKYRL_GROUP,
        "dapo": _SKYRL_GROUP,
        "gspo": {"advantage": {"singleton": "raw"}, "policy_loss": {"fn": losses.gspo_token, **_SEQUENCE_RATIO}},
        "sapo": {"advantage": {"singleton": "raw"}},
        "cispo": _SKYRL_GROUP,
        "dppo": {**_SKYRL_GROUP, "policy_loss": {"threshold_low": 0.1, "threshold_high": 0.2}},
    },
    "slime-2026.08": {"grpo": {}, "cispo": {**_NARROW_CISPO, "aggregation": losses.seq_mean_token_mean}},
    "areal-2026.05": {
        "grpo": {**_AREAL_GROUP, **_TOKEN_MEAN},
        "decoupled_ppo": {**_AREAL_GROUP, "policy_loss": losses.clipped_surrogate, "corrections": (_AREAL_WEIGHTS,)},
        "sapo": {**_AREAL_GROUP, **_TOKEN_MEAN},
    },
    "prime-rl-2026.08": {"grpo": {**_PRIME_GROUP, **_PRIME_DPPO}},
    "prime-rl-2026.09": {
        "grpo": {**_PRIME_GROUP, "policy_loss": use(losses.tv_symmetric, threshold=0.3), "loss_terms": ()}
    },
}

DIALECTS = {name: tuple(presets) for name, presets in _DIALECTS.items()}
"""The presets of each dialect."""


def in_dialects(preset: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """The preset with the settings of the library that its argument ``dialect`` names.

    Raises:
        ValueError: an unknown dialect, or a dialect without this preset.
    """

    @wraps(preset)
    def in_dialect(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        algorithm, dialect = preset(*args, **kwargs), kwargs.get("dialect")
        if dialect is None:
            return algorithm
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect={dialect!r}, expected one of {', '.join(_DIALECTS)}")
        presets = _DIALECTS[str(dialect)]
        if algorithm.name not in presets:
            raise ValueError(f"{algorithm.name} has no dialect {dialect!r}; its presets are {', '.join(presets)}")
        return algorithm.replace(**presets[algorithm.name])

    return in_dialect
