"""Algorithms as data: which primitive fills each stage.

>>> from rlprims import algorithms, losses
>>> mine = algorithms.grpo(kl_coef=0.0).replace(name="mine", aggregation=losses.token_mean)
>>> algorithms.diff(algorithms.grpo(kl_coef=0.0), mine)["aggregation.fn"]
('rlprims.losses.seq_mean_token_mean', 'rlprims.losses.token_mean')
"""

from rlprims.algorithms._algorithm import Algorithm, GroupFilter, KLInReward, LossTerm, diff, knobs, merge, parse
from rlprims.algorithms._check import Finding, check
from rlprims.algorithms._stages import (
    assess_groups,
    estimate_advantages,
    policy_objective,
    shape_scores,
    value_objective,
)
from rlprims.algorithms._use import Use, import_path, use
from rlprims.algorithms.presets import (
    cispo,
    dapo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    maxrl,
    opo,
    ppo,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    sapo,
)

PRESETS = {
    preset.__name__: preset
    for preset in (
        cispo,
        dapo,
        dr_grpo,
        gmpo,
        grpo,
        gspo,
        maxrl,
        opo,
        ppo,
        reinforce,
        reinforce_pp,
        reinforce_pp_baseline,
        remax,
        rloo,
        sapo,
    )
}
"""What a configuration file may name; Python calls the functions."""

__all__ = [
    "PRESETS",
    "Algorithm",
    "Finding",
    "GroupFilter",
    "KLInReward",
    "LossTerm",
    "Use",
    "assess_groups",
    "check",
    "cispo",
    "dapo",
    "diff",
    "dr_grpo",
    "estimate_advantages",
    "gmpo",
    "grpo",
    "gspo",
    "import_path",
    "knobs",
    "maxrl",
    "merge",
    "opo",
    "parse",
    "policy_objective",
    "ppo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "shape_scores",
    "use",
    "value_objective",
]
