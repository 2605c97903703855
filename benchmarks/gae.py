"""GAE over (B, T), whitened, with the critic's targets: what verl's one function does is three lines here.

Rows beside them: by the formulas alone, without kernels; and without whitening, as a critic's targets or a trainer
that whitens elsewhere would, which verl cannot.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import Case, by_formulas, largest_error
from benchmarks._peers import torchrl, verl
from rlprims import advantage

SIZES = ((256, 1024), (64, 32768), (1024, 8192))
GAMMA, LAM = 1.0, 0.95
BYTES = 17  # per token: rewards, values and mask are read, advantages and returns written


class NotWhitened(NamedTuple):
    advantages: Tensor
    returns: Tensor


def cases(quick: bool) -> Iterator[Case]:
    for size in SIZES[:2] if quick else SIZES:
        for holes in (False, True):
            yield _case(*size, holes)


def _case(rows: int, width: int, holes: bool) -> Case:
    generator = torch.Generator().manual_seed(0)
    rewards = 0.1 * torch.randn(rows, width, generator=generator)
    values = torch.randn(rows, width, generator=generator)
    mask = torch.ones(rows, width, dtype=torch.bool)
    if holes:  # tool output: an eighth of each response in runs of 16 tokens
        runs = torch.rand(rows, width // 16, generator=generator) < 1 / 8
        mask = ~runs.repeat_interleave(16, dim=1)

    whitened, plain, targets = _oracle(rewards, values, mask)
    peers: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    if (core := verl()) is not None:
        peers["verl"] = partial(
            core.compute_gae_advantage_return,
            token_level_rewards=rewards,
            values=values,
            response_mask=mask.float(),
            gamma=GAMMA,
            lam=LAM,
        )
    if not holes and (functional := torchrl()) is not None:  # it takes ends of episodes, and no gaps in them
        done = torch.zeros(rows, width, 1, dtype=torch.bool)
        done[:, -1] = True
        following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
        peers["torchrl"] = partial(
            _by_torchrl,
            functional.vec_generalized_advantage_estimate,
            *(x[..., None] for x in (values, following, rewards)),
            done,
        )
    peers["rlprims, not whitened"] = partial(_not_whitened, rewards, values, mask)  # not next to ours: caches are warm
    peers["rlprims, formulas"] = by_formulas(partial(_ours, rewards, values, mask))
    return Case(
        family="gae",
        name=f"{rows}x{width}{' holes' if holes else ''}",
        ours=partial(_ours, rewards, values, mask),
        peers=peers,
        error=lambda got: largest_error(got, (plain if isinstance(got, NotWhitened) else whitened, targets), mask),
        floor_bytes=BYTES * rows * width,
    )


def _ours(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    a = advantage.gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    return advantage.whiten(a, mask), a.add_(values)  # a is ours, and not needed any more


def _not_whitened(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    a = advantage.gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    return NotWhitened(a, a + values)


def _by_torchrl(vec_gae: Callable[..., tuple[Tensor, Tensor]], *data: Tensor) -> tuple[Tensor, Tensor]:
    a, targets = (x[..., 0] for x in vec_gae(GAMMA, LAM, *data))
    return (a - a.mean()) / (a.var() + 1e-8).sqrt(), targets


def _oracle(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, whitened and not, and targets: token by token in float64, from the definition."""
    r, v, m = (x.T.double().contiguous() for x in (rewards, values, mask))
    a = torch.zeros_like(r)
    next_value, next_advantage = torch.zeros_like(r[0]), torch.zeros_like(r[0])
    for t in range(len(r) - 1, -1, -1):
        here = r[t] + GAMMA * next_value - v[t] + GAMMA * LAM * next_advantage
        next_value = torch.where(m[t] > 0, v[t], next_value)
        next_advantage = torch.where(m[t] > 0, here, next_advantage)
        a[t] = here
    a = a.T.contiguous()
    valid = a[mask]
    return (a - valid.mean()) / (valid.var() + 1e-8).sqrt(), a, a + values.double()
