"""Algorithms by their papers. Each function returns an :class:`Algorithm`; ``.replace(...)`` changes it.

Values that a paper does not give, or that depend on the run (group size, learning rate), are parameters or fields. With
``dialect`` the numbers are those of another library: ``grpo(dialect="trl-1.16")``. ``DIALECTS`` lists the presets of
each dialect.
"""

from rlprims.algorithms.presets._credit import fipo, prime, tree_grpo, turn_grpo
from rlprims.algorithms.presets._critic import ppo, reinforce_pp, reinforce_pp_baseline, vapo
from rlprims.algorithms.presets._dialects import DIALECTS as DIALECTS
from rlprims.algorithms.presets._distilled import iw_opd, mopd, opd, opsd, rlsd, sdar, sdft, sdpo
from rlprims.algorithms.presets._group import bnpo, dapo, dr_grpo, gdpo, grpo, lite_ppo, pass_at_k, quantile
from rlprims.algorithms.presets._in_groups import flowrl, gvpo, online_dpo, real
from rlprims.algorithms.presets._mixed import chord, echo, luffy, sft
from rlprims.algorithms.presets._ratio import (
    aspo,
    cispo,
    decoupled_ppo,
    dppo,
    gmpo,
    gppo,
    gspo,
    luspo,
    opmd,
    sapo,
    topr,
    vespo,
)
from rlprims.algorithms.presets._reinforce import (
    asymre,
    gpg,
    maxrl,
    opo,
    pkpo,
    reinforce,
    remax,
    rloo,
    spo,
    w_reinforce,
)
from rlprims.algorithms.presets._selected import bapo, clip_cov, high_entropy, kl_cov, m2po

__all__ = [
    "aspo",
    "asymre",
    "bapo",
    "bnpo",
    "chord",
    "cispo",
    "clip_cov",
    "dapo",
    "decoupled_ppo",
    "dppo",
    "dr_grpo",
    "echo",
    "fipo",
    "flowrl",
    "gdpo",
    "gmpo",
    "gpg",
    "gppo",
    "grpo",
    "gspo",
    "gvpo",
    "high_entropy",
    "iw_opd",
    "kl_cov",
    "lite_ppo",
    "luffy",
    "luspo",
    "m2po",
    "maxrl",
    "mopd",
    "online_dpo",
    "opd",
    "opmd",
    "opo",
    "opsd",
    "pass_at_k",
    "pkpo",
    "ppo",
    "prime",
    "quantile",
    "real",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "rlsd",
    "sapo",
    "sdar",
    "sdft",
    "sdpo",
    "sft",
    "spo",
    "topr",
    "tree_grpo",
    "turn_grpo",
    "vapo",
    "vespo",
    "w_reinforce",
]
