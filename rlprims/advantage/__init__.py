"""Advantage estimators: they compute one advantage per token from rewards.

``rewards`` are per token, shaped, ``(B, T)`` or packed ``(N,)``. Advantages have that shape, 0 outside the mask. The
target of a critic is ``returns = advantages + values``, or the result of ``td_lambda`` or ``vtrace_returns``.

``valid_rows`` is a mask of rows, for every estimator that compares rows. A row that is not valid (aborted, rejected, or
of unknown score) is not read, is in no statistic, and gets 0. To compare a row with a group without adding it to the
group's statistics, give its baseline to ``remax``:
``remax(rewards, grouping.group_mean(scores, group_ids, valid_rows), response_mask)``.
"""

from rlprims._near import suggest_attributes
from rlprims.advantage._baselines import RoleBaseline, ValueTracker, optimal_value, remax, spo
from rlprims.advantage._gdpo import gdpo
from rlprims.advantage._group import gpg, grpo, opo, quantile_baseline, rloo
from rlprims.advantage._pass_at_k import beta_normalized, maxrl, pass_at_k_training, pkpo
from rlprims.advantage._returns import discounted_returns, gae, length_adaptive_gae, td_lambda
from rlprims.advantage._teacher import iw_opd, rlsd, teacher_gap
from rlprims.advantage._token_baseline import optimal_token_baseline
from rlprims.advantage._transforms import clip_advantages, reinforce_pp, reinforce_pp_baseline, weight_by_sign, whiten
from rlprims.advantage._trees import gigpo, rtmc, tree_grpo
from rlprims.advantage._turn_credit import draco, prime, turn_grpo, vineppo
from rlprims.advantage._vtrace import vtrace, vtrace_returns

__all__ = [
    "RoleBaseline", "ValueTracker", "beta_normalized", "clip_advantages", "discounted_returns", "draco", "gae",
    "gdpo", "gigpo", "gpg", "grpo", "iw_opd", "length_adaptive_gae", "maxrl", "opo", "optimal_token_baseline",
    "optimal_value", "pass_at_k_training", "pkpo", "prime", "quantile_baseline", "reinforce_pp",
    "reinforce_pp_baseline", "remax", "rloo", "rlsd", "rtmc", "spo", "td_lambda", "teacher_gap", "tree_grpo",
    "turn_grpo", "vineppo", "vtrace", "vtrace_returns", "weight_by_sign", "whiten",
]  # fmt: skip

suggest_attributes(__name__, __all__)
