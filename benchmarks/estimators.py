"""The other estimators that verl has too, from labels to tokens. The oracle is verl's own function, in float64."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks._harness import Case, largest_error
from benchmarks._labels import uids
from benchmarks._peers import peer, verl
from rlprims import advantage, grouping

SIZES = ((1024, 512), (8192, 64))
GROUP = 16
BYTES = 9  # per token: rewards and mask are read, advantages written
Estimate = Callable[..., Tensor]


class Batch(NamedTuple):
    rewards: Tensor
    mask: Tensor
    labels: np.ndarray
    baselines: Tensor
    old_log_probs: Tensor
    sum_pi_squared: Tensor


def grouped(estimate: Estimate) -> Callable[[Batch], Tensor]:
    return lambda b: estimate(b.rewards, grouping.dense_ids(b.labels), b.mask)


def of_tokens(b: Batch) -> Tensor:
    ids = grouping.dense_ids(b.labels)
    return advantage.optimal_token_baseline(
        b.rewards, ids, b.old_log_probs, b.sum_pi_squared, b.mask, align="columns", singleton="raw"
    )


OURS: dict[str, Callable[[Batch], Tensor]] = {
    "rloo": grouped(advantage.rloo),
    "rloo_vectorized": grouped(advantage.rloo),
    "reinforce_plus_plus_baseline": grouped(advantage.reinforce_pp_baseline),
    "opo": grouped(advantage.opo),
    "gpg": grouped(partial(advantage.gpg, informative="nonzero_reward")),
    "grpo_passk": grouped(partial(advantage.pass_at_k_training, normalize_std=True)),
    "remax": lambda b: advantage.remax(b.rewards, b.baselines, b.mask),
    "optimal_token_baseline": of_tokens,
}


def cases(quick: bool) -> Iterator[Case]:
    core, configs = verl(), peer("verl.trainer.config")
    if core is None or configs is None:
        return
    config = configs.AlgoConfig(norm_adv_by_std_in_grpo=True)
    for rows, width in SIZES[:1] if quick else SIZES:
        batch = _batch(rows, width)
        for name, ours in OURS.items():
            yield Case(
                family="estimators",
                name=f"{rows}x{width} g{GROUP} {name}",
                ours=partial(ours, batch),
                peers={"verl": partial(_theirs, core, config, name, batch)},
                error=partial(_error, _theirs(core, config, name, _double(batch))),
                floor_bytes=BYTES * rows * width,
            )


def _error(want: Tensor, got: Tensor) -> float:
    return largest_error((got,), (want,))


def _theirs(core: Any, config: Any, name: str, b: Batch) -> Tensor:
    answer: Tensor = core.get_adv_estimator_fn(name)(
        token_level_rewards=b.rewards,
        response_mask=b.mask.to(b.rewards.dtype),
        index=b.labels,
        config=config,
        reward_baselines=b.baselines,
        old_log_probs=b.old_log_probs,
        sum_pi_squared=b.sum_pi_squared,
    )[0]
    return answer


def _double(b: Batch) -> Batch:
    return Batch(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in b))


def _batch(rows: int, width: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    rewards = torch.zeros(rows, width).scatter(1, lengths - 1, torch.rand(rows, 1, generator=generator))
    old_log_probs = torch.where(mask, -torch.rand(rows, width, generator=generator), 0.0)
    pi = old_log_probs.exp()  # of the squares in Σπ² π's own is one, the others add at most (1 − π)²
    others = (1 - pi).square() * torch.rand(rows, width, generator=generator)
    return Batch(
        rewards,
        mask,
        uids(rows, GROUP, shuffled=True),
        torch.rand(rows, generator=generator),
        old_log_probs,
        torch.where(mask, pi.square() + others, 0.0),
    )
