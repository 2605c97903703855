"""The other losses that verl has too, forward and backward; verl's have their metrics inside.

The oracle is the gradient of verl's own function, in float64: several of its losses have another value than their
paper's and the same gradient.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import Case, largest_error
from benchmarks._peers import verl, verl_actor
from rlprims import losses

SIZES = ((64, 1024), (1024, 2048))
LOW, HIGH, LARGEST = 0.2, 0.28, 3.0
BYTES = 17  # per token: two log-probs, advantages and mask are read, the gradient is written
SEQUENCES = "seq-mean-token-mean"


class Tokens(NamedTuple):
    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    def double(self) -> "Tokens":
        log_probs, old, advantages = (x.detach().double() for x in self[:3])
        return Tokens(log_probs.requires_grad_(), old, advantages, self.mask)


Loss = Callable[[Tokens], Tensor]
BOUNDS = {"clip_low": LOW, "clip_high": HIGH}
REGION = {"threshold_low": LOW, "threshold_high": HIGH, "w_max": LARGEST}
OURS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cispo": (partial(losses.cispo, w_min=1 - LOW, w_max=1 + HIGH), "token-mean"),
    "gspo": (partial(losses.gspo, **BOUNDS), SEQUENCES),
    "sapo": (losses.sapo, SEQUENCES),
    "geo_mean": (partial(losses.gmpo, **BOUNDS), SEQUENCES),
    "dppo_tv": (partial(losses.dppo, divergence="tv", **REGION), "token-mean"),
    "dppo_kl": (partial(losses.dppo, divergence="kl", **REGION), "token-mean"),
    "gpg": (lambda log_probs, old, advantages, mask: losses.reinforce(log_probs, advantages, mask), "token-mean"),
    "value": (
        lambda log_probs, old, advantages, mask: losses.value_loss(log_probs, old, advantages, mask, clip=0.5),
        "token-mean",
    ),
    "kl k3": (lambda log_probs, old, advantages, mask: losses.kl(log_probs, old, mask), "token-mean"),
}
AGGREGATIONS = {"token-mean": losses.token_mean, SEQUENCES: losses.seq_mean_token_mean}


def cases(quick: bool) -> Iterator[Case]:
    core = verl()
    config = verl_actor(clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=LARGEST, tau_pos=1.0, tau_neg=1.05)
    if core is None or config is None:
        return
    for rows, width in SIZES[:1] if quick else SIZES:
        tokens = _tokens(rows, width)
        for name, (ours, aggregation) in OURS.items():
            theirs = partial(_theirs, core, config, name, aggregation)
            want = _gradient(theirs, tokens.double())
            yield Case(
                family="losses",
                name=f"{rows}x{width} {name}",
                ours=partial(_gradient, partial(_ours, ours, aggregation), tokens),
                peers={"verl": partial(_gradient, theirs, tokens)},
                error=partial(_error, want),
                floor_bytes=BYTES * rows * width,
            )


def _error(want: Tensor, got: Tensor) -> float:
    return largest_error((got,), (want,))


def _gradient(loss: Loss, tokens: Tokens) -> Tensor:
    return torch.autograd.grad(loss(tokens), tokens.log_probs)[0]


def _ours(loss: Callable[..., Tensor], aggregation: str, tokens: Tokens) -> Tensor:
    return AGGREGATIONS[aggregation](loss(*tokens), tokens.mask)


def _theirs(core: Any, config: Any, name: str, aggregation: str, tokens: Tokens) -> Tensor:
    mask = tokens.mask.to(tokens.log_probs.dtype)
    if name == "value":
        return core.compute_value_loss(tokens.log_probs, tokens.advantages, tokens.old, mask, 0.5, aggregation)[0]
    if name == "kl k3":
        return core.agg_loss(core.kl_penalty(tokens.log_probs, tokens.old, "k3"), mask, aggregation)
    policy_loss = core.get_policy_loss_fn(name)
    return policy_loss(tokens.old, tokens.log_probs, tokens.advantages, mask, aggregation, config)[0]


def _tokens(rows: int, width: int) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(rows, width, generator=generator)
    old = (log_probs + 0.3 * torch.randn(rows, width, generator=generator)).clamp(max=-1e-3)  # as log-probs are
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous()
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator)
    return Tokens(log_probs.requires_grad_(), old, advantages, torch.arange(width) < lengths)
