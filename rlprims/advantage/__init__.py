"""Advantage estimators: rewards in, one advantage per token out.

``rewards`` are per token, shaped, ``(B, T)`` or packed ``(N,)``. Every estimator returns advantages of that shape, 0
outside the mask; a critic's target is one line for the caller, ``returns = advantages + values``, or a function of its
own: ``td_lambda``, ``vtrace_returns``. ``whiten``, ``clip`` and ``positive_negative`` change given advantages.

``valid_rows`` are to rows what the mask is to tokens: one that is not valid (aborted, rejected, of unknown score) is
absent. It is not read, is in no statistic and gets 0, by every estimator that compares rows. A row that is to be
compared with a group and not to be in it has a baseline of its own:
``remax(rewards, grouping.group_mean(scores, group_ids, valid_rows), response_mask)``.

Any number per response is a baseline for ``remax``: the greedy response's score, ``optimal_value``, or what a
``RoleBaseline`` or a ``ValueTracker`` remembers.
"""

from rlprims.advantage._beta_normalized import beta_normalized
from rlprims.advantage._clip import clip
from rlprims.advantage._gae import gae
from rlprims.advantage._gdpo import gdpo
from rlprims.advantage._gigpo import gigpo
from rlprims.advantage._gpg import gpg
from rlprims.advantage._grpo import grpo
from rlprims.advantage._length_adaptive_gae import length_adaptive_gae
from rlprims.advantage._maxrl import maxrl
from rlprims.advantage._opo import opo
from rlprims.advantage._optimal_token_baseline import optimal_token_baseline
from rlprims.advantage._optimal_value import optimal_value
from rlprims.advantage._pass_at_k import pass_at_k
from rlprims.advantage._pkpo import pkpo
from rlprims.advantage._positive_negative import positive_negative
from rlprims.advantage._quantile import quantile
from rlprims.advantage._reinforce_pp import reinforce_pp
from rlprims.advantage._reinforce_pp_baseline import reinforce_pp_baseline
from rlprims.advantage._remax import remax
from rlprims.advantage._returns import discounted_returns
from rlprims.advantage._rloo import rloo
from rlprims.advantage._td_lambda import td_lambda
from rlprims.advantage._trackers import RoleBaseline, ValueTracker
from rlprims.advantage._vtrace import vtrace, vtrace_returns
from rlprims.advantage._whiten import whiten

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
    "length_adaptive_gae",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "optimal_value",
    "pass_at_k",
    "pkpo",
    "positive_negative",
    "quantile",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "td_lambda",
    "vtrace",
    "vtrace_returns",
    "whiten",
]
