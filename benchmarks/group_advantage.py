"""GRPO's group-relative advantage from labels to tokens; ours includes turning the labels into ids.

TRL's normalization is written inside its generation method and cannot be called on its own: it is not timed.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks._harness import Case, largest_error
from benchmarks._labels import numbers, uids
from benchmarks._peers import verl
from rlprims import advantage, grouping

EPS = 1e-6
LABELS: dict[str, Callable[[int, int], np.ndarray]] = {
    "str in order": partial(uids, shuffled=False),
    "str shuffled": partial(uids, shuffled=True),
    "int in order": partial(numbers, shuffled=False),
    "int shuffled": partial(numbers, shuffled=True),
}
SMALL = ((8192, 1, 16, "str in order"), (8192, 1, 16, "str shuffled"), (8192, 1, 16, "int shuffled"))
LARGE = (
    (8192, 1, 16, "int in order"),
    (8192, 512, 16, "str shuffled"),
    (131072, 1, 16, "str shuffled"),
    (131072, 1, 16, "int in order"),
    (131072, 1, 16, "int shuffled"),
)
BYTES = 9  # per token: rewards and mask are read, advantages written


def cases(quick: bool) -> Iterator[Case]:
    for rows, width, group, labels in SMALL if quick else SMALL + LARGE:
        yield _case(rows, width, group, labels)


def _case(rows: int, width: int, group: int, labels: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    names = LABELS[labels](rows, group)
    mask = torch.ones(rows, width, dtype=torch.bool)
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.rand(rows, generator=generator)

    want = (_oracle(rewards, names, mask),)
    peers = {}
    if (core := verl()) is not None:
        arguments = {"token_level_rewards": rewards, "response_mask": mask.float(), "index": names, "epsilon": EPS}
        peers["verl grpo"] = partial(core.compute_grpo_outcome_advantage, **arguments)
        peers["verl grpo_vectorized"] = partial(core.compute_grpo_vectorized_outcome_advantage, **arguments)
    return Case(
        family="group",
        name=f"{rows}x{width} g{group} {labels}",
        ours=partial(_ours, rewards, names, mask),
        peers=peers,
        error=lambda got: largest_error(got[:1], want),
        floor_bytes=BYTES * rows * width if width > 1 else 0,
    )


def _ours(rewards: Tensor, names: np.ndarray, mask: Tensor) -> tuple[Tensor]:
    return (advantage.grpo(rewards, grouping.dense_ids(names), mask, eps=EPS),)


def _oracle(rewards: Tensor, names: np.ndarray, mask: Tensor) -> Tensor:
    """Group by group in float64, from the definition."""
    scores = rewards.double().sum(-1).numpy()
    order = np.argsort(names, kind="stable")
    starts = np.flatnonzero(np.r_[True, names[order][1:] != names[order][:-1]])
    a = np.empty_like(scores)
    for rows in np.split(order, starts[1:]):
        a[rows] = (scores[rows] - scores[rows].mean()) / (scores[rows].std(ddof=1) + EPS)
    return torch.from_numpy(a)[:, None] * mask
