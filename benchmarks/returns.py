"""Returns of other kinds: discounted, V-trace (advantages and targets), and REINFORCE++ (whitened).

The rows "rlprims, formulas" are the same calls without kernels.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks._harness import Case, by_formulas, largest_error
from benchmarks._peers import torchrl, verl
from rlprims import advantage

SIZES = ((256, 1024), (64, 8192))
GAMMA = 0.99


def cases(quick: bool) -> Iterator[Case]:
    for rows, width in SIZES[:1] if quick else SIZES:
        generator = torch.Generator().manual_seed(0)
        r = 0.1 * torch.randn(rows, width, generator=generator)
        v = torch.randn(rows, width, generator=generator)
        log_pi = -1 + 0.1 * torch.randn(rows, width, generator=generator)
        log_mu = -1 + 0.1 * torch.randn(rows, width, generator=generator)
        dense = torch.ones(rows, width, dtype=torch.bool)
        holes = ~(torch.rand(rows, width // 16, generator=generator) < 1 / 8).repeat_interleave(16, dim=1)
        yield _discounted(r, dense)
        yield _vtrace(r, v, log_pi, log_mu, dense)
        yield _reinforce_pp(r, dense, "")
        yield _reinforce_pp(r, holes, " holes")


def _discounted(r: Tensor, mask: Tensor) -> Case:
    peers = {}
    if (functional := torchrl()) is not None:
        peers["torchrl"] = partial(_reward_to_go, functional.reward2go, r[..., None], _done(r))
    return _case(
        f"discounted {_size(r)}",
        lambda: (advantage.discounted_returns(r, mask, gamma=GAMMA),),
        peers,
        (_carried(r.double(), mask, GAMMA),),
        mask,
        9,
    )


def _reward_to_go(reward_to_go: Callable[..., Tensor], rewards: Tensor, done: Tensor) -> tuple[Tensor]:
    return (reward_to_go(rewards, done, GAMMA).view(rewards.shape[:2]),)


def _vtrace(r: Tensor, v: Tensor, log_pi: Tensor, log_mu: Tensor, mask: Tensor) -> Case:
    def ours() -> tuple[Tensor, Tensor]:
        data = (r, v, log_pi, log_mu, mask)
        return advantage.vtrace(*data, gamma=GAMMA), advantage.vtrace_returns(*data, gamma=GAMMA)

    peers = {}
    if (functional := torchrl()) is not None:
        peers["torchrl"] = partial(
            _squeezed,
            functional.vtrace_advantage_estimate,
            GAMMA,
            *(x[..., None] for x in (log_pi, log_mu, v, _shifted(v), r)),
            _done(r),
        )
    rho = (log_pi.double() - log_mu.double()).exp().clamp(max=1)
    delta = rho * (r.double() + GAMMA * _shifted(v.double()) - v.double())
    targets = v.double() + _carried(delta, mask, GAMMA * rho)
    advantages = rho * (r.double() + GAMMA * _shifted(targets) - v.double())
    return _case(f"vtrace {_size(r)}", ours, peers, (advantages, targets), mask, 25)


def _squeezed(function: Callable[..., tuple[Tensor, ...]], *arguments: object) -> tuple[Tensor, ...]:
    return tuple(x[..., 0] for x in function(*arguments))


def _reinforce_pp(r: Tensor, mask: Tensor, which: str) -> Case:
    peers = {}
    if (core := verl()) is not None:
        peers["verl"] = partial(
            core.compute_reinforce_plus_plus_outcome_advantage,
            token_level_rewards=r,
            response_mask=mask.float(),
            config=SimpleNamespace(gamma=GAMMA),
        )
    returns = _carried(r.double(), mask, GAMMA)
    valid = returns[mask]
    want = (returns - valid.mean()) / (valid.var() + 1e-8).sqrt()
    return _case(
        f"reinforce++ {_size(r)}{which}",
        lambda: (advantage.reinforce_pp(r, mask, gamma=GAMMA),),
        peers,
        (want,),
        mask,
        9,
    )


def _case(
    name: str,
    ours: Callable[[], object],
    peers: Mapping[str, Callable[[], object]],
    want: tuple[Tensor, ...],
    mask: Tensor,
    bytes_per_token: int,
) -> Case:
    return Case(
        family="returns",
        name=name,
        ours=ours,
        peers=dict(peers) | {"rlprims, formulas": by_formulas(ours)},
        error=lambda got: largest_error(got[: len(want)], want, mask),
        floor_bytes=bytes_per_token * mask.numel(),
    )


def _carried(x: Tensor, mask: Tensor, coefficient: Tensor | float) -> Tensor:
    """Token by token in float64: S_t = x_t + coefficient S_{t+1} over the valid ones."""
    a = torch.as_tensor(coefficient, dtype=x.dtype).expand(x.shape).T.contiguous()
    s, m, carry = x.T.contiguous(), mask.T.contiguous(), torch.zeros(len(x), dtype=x.dtype)
    for t in range(len(s) - 1, -1, -1):
        s[t] += a[t] * carry
        carry = torch.where(m[t], s[t], carry)
    return s.T.contiguous()


def _shifted(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _done(x: Tensor) -> Tensor:
    """torchrl's flags: every row is an episode, which ends with its last token."""
    done = torch.zeros(*x.shape, 1, dtype=torch.bool)
    done[:, -1] = True
    return done


def _size(x: Tensor) -> str:
    return f"{x.shape[0]}x{x.shape[1]}"
