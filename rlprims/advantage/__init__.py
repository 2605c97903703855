"""Advantage estimators: they compute one advantage per token from rewards.

``rewards`` are per token, shaped, ``(B, T)`` or packed ``(N,)``. Every estimator returns advantages of that shape, 0
outside the mask ("float, like rewards" means: a float tensor of the same shape). The target of a critic is
``returns = advantages + values``, or the result of ``td_lambda`` or ``vtrace_returns``. ``whiten``, ``clip`` and
``positive_negative`` change given advantages.

``valid_rows`` is a mask of rows, for every estimator that compares rows. A row that is not valid (aborted, rejected, or
of unknown score) is not read, is in no statistic, and gets 0. To compare a row with a group without adding it to the
group's statistics, give its baseline to ``remax``:
``remax(rewards, grouping.group_mean(scores, group_ids, valid_rows), response_mask)``.

The baseline of ``remax`` may be any number per response: the score of the greedy response, ``optimal_value``, or the
value that a ``RoleBaseline`` or a ``ValueTracker`` stores.
"""

from rlprims.advantage._baselines import RoleBaseline, ValueTracker, optimal_value, remax, spo
from rlprims.advantage._gdpo import gdpo
from rlprims.advantage._gigpo import gigpo
from rlprims.advantage._group import gpg, grpo, opo, quantile, rloo
from rlprims.advantage._pass_at_k import pass_at_k, pkpo
from rlprims.advantage._pass_rate import beta_normalized, maxrl
from rlprims.advantage._prime import prime
from rlprims.advantage._returns import discounted_returns, gae, length_adaptive_gae, td_lambda
from rlprims.advantage._teacher import iw_opd, rlsd, teacher_gap
from rlprims.advantage._token_baseline import optimal_token_baseline
from rlprims.advantage._transforms import clip, positive_negative, reinforce_pp, reinforce_pp_baseline, whiten
from rlprims.advantage._trees import rtmc, tree
from rlprims.advantage._turn_credit import turn_grpo, vine
from rlprims.advantage._vtrace import vtrace, vtrace_returns

__all__ = [
    "RoleBaseline",
    "ValueTracker",
    "beta_normalized",
    "clip",
    "discounted_returns",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "iw_opd",
    "length_adaptive_gae",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "optimal_value",
    "pass_at_k",
    "pkpo",
    "positive_negative",
    "prime",
    "quantile",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "rlsd",
    "rtmc",
    "spo",
    "td_lambda",
    "teacher_gap",
    "tree",
    "turn_grpo",
    "vine",
    "vtrace",
    "vtrace_returns",
    "whiten",
]
