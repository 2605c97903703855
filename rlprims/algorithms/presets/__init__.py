"""Algorithms by their papers. Each function returns an :class:`Algorithm`; ``.replace(...)`` changes it.

Values that a paper does not give, or that depend on the run (group size, learning rate), are parameters or fields. With
``dialect`` the numbers are those of another library: ``grpo(dialect="trl-1.16")``. ``DIALECTS`` lists them.
"""

from rlprims.algorithms.presets._credit import fipo, prime, tree_grpo, turn_grpo
from rlprims.algorithms.presets._dialects import DIALECTS as DIALECTS
from rlprims.algorithms.presets._distilled import iw_opd, mopd, opd, opsd, rlsd, sdar, sdft, sdpo
from rlprims.algorithms.presets._group import (
    bnpo, dapo, dr_grpo, flowrl, gdpo, grpo, gvpo, lite_ppo, online_dpo, pass_at_k_training, quantile_baseline, real,
)  # fmt: skip
from rlprims.algorithms.presets._ratio import (
    aspo, cispo, decoupled_ppo, dppo, gmpo, gppo, gspo, luspo, opmd, sapo, topr, vespo,
)  # fmt: skip
from rlprims.algorithms.presets._reinforce import (
    asymre, gpg, maxrl, opo, pkpo, ppo, reinforce, reinforce_pp, reinforce_pp_baseline, remax, rloo, sao, spo, vapo,
    w_reinforce,
)  # fmt: skip
from rlprims.algorithms.presets._selected import bapo, chord, clip_cov, echo, high_entropy, kl_cov, luffy, m2po, sft

__all__ = [
    "aspo", "asymre", "bapo", "bnpo", "chord", "cispo", "clip_cov", "dapo", "decoupled_ppo", "dppo", "dr_grpo",
    "echo", "fipo", "flowrl", "gdpo", "gmpo", "gpg", "gppo", "grpo", "gspo", "gvpo", "high_entropy", "iw_opd",
    "kl_cov", "lite_ppo", "luffy", "luspo", "m2po", "maxrl", "mopd", "online_dpo", "opd", "opmd", "opo", "opsd",
    "pass_at_k_training", "pkpo", "ppo", "prime", "quantile_baseline", "real", "reinforce", "reinforce_pp",
    "reinforce_pp_baseline", "remax", "rloo", "rlsd", "sao", "sapo", "sdar", "sdft", "sdpo", "sft", "spo", "topr",
    "tree_grpo", "turn_grpo", "vapo", "vespo", "w_reinforce",
]  # fmt: skip
