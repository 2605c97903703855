"""Tools for notebooks: the advantage, loss and gradient of each token, with the reason, on a few rollouts.

The numbers come from the stages of :mod:`rlprims.algorithms` and from autograd. Pictures need the extra ``lab``.

>>> import torch
>>> from rlprims import algorithms, lab
>>> batch = {"scores": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0])}
>>> table = lab.simulate(algorithms.grpo(kl_coef=0.0), {**batch, "response_mask": torch.ones(2, 1, dtype=torch.bool)})
>>> [round(push, 3) for push in table["gradient"]]
[0.354, -0.354]
"""

from rlprims.lab._compare import Comparison, compare
from rlprims.lab._display import Page, Table, figure
from rlprims.lab._explain import explain
from rlprims.lab._rollouts import load_jsonl, load_run, load_trl, load_verl
from rlprims.lab._simulate import simulate

__all__ = [
    "Comparison", "Page", "Table", "compare", "explain", "figure", "load_jsonl", "load_run", "load_trl", "load_verl",
    "simulate",
]  # fmt: skip
