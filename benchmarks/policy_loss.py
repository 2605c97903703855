"""The clipped policy loss, forward and backward, with the metrics that trainers log at each step.

verl always applies the dual clip, TRL never does by default: each is compared with the same mathematics of ours.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import Case, Function, largest_error
from benchmarks._peers import trl, verl, verl_actor
from rlprims import diagnostics, losses

SIZES = ((256, 2048), (64, 1024), (1024, 8192))
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
BYTES = 17  # per token: two log-probs, advantages and mask are read, the gradient is written
WITHOUT_METRICS = "rlprims, loss alone"  # the peers' metrics are inside their functions
COMPILED = "rlprims, compiled"  # loss, mean and metrics traced as one graph
COMPILED_ALONE = "rlprims, loss alone, compiled"
COMPILER = "g++"
NEAR = 1e-5  # around a bound, float32 may fall on either side


class Tokens(NamedTuple):
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


def cases(quick: bool) -> Iterator[Case]:
    for size in SIZES[:2] if quick else SIZES:
        tokens = _tokens(*size)
        for name, dual, peers in (("dual clip", DUAL, {"verl": _verl}), ("two-sided", None, {"trl": _trl})):
            compiled = {
                COMPILED: partial(_compiled, dual=dual, metrics=True),
                COMPILED_ALONE: partial(_compiled, dual=dual, metrics=False),
            }
            yield _case(name, tokens, dual, peers if quick else {**peers, **compiled})


def _tokens(rows: int, width: int) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(rows, width, generator=generator)
    old = log_probs + 0.3 * torch.randn(rows, width, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous()
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator)
    return Tokens(log_probs.requires_grad_(), old, advantages, torch.arange(width) < lengths)


def _case(name: str, tokens: Tokens, dual: float | None, peers: dict[str, Callable[[Tokens], Function | None]]) -> Case:
    rows, width = tokens.mask.shape
    loss, gradient, far = _oracle(tokens, dual)
    built = {who: build(tokens) for who, build in peers.items()} | {WITHOUT_METRICS: partial(_loss_alone, tokens, dual)}
    return Case(
        family="loss",
        name=f"{rows}x{width} {name}",
        ours=partial(_ours, tokens, dual),
        peers={who: function for who, function in built.items() if function is not None},
        error=lambda got: max(largest_error(got[:1], (loss,)), largest_error(got[1:], (gradient,), far)),
        floor_bytes=BYTES * rows * width,
    )


def _ours(tokens: Tokens, dual: float | None) -> tuple[Tensor, Tensor]:
    diagnostics.ratio_stats(*tokens, clip_low=LOW, clip_high=HIGH)
    return _loss_alone(tokens, dual)


def _loss_alone(tokens: Tokens, dual: float | None) -> tuple[Tensor, Tensor]:
    per_token = losses.clipped_surrogate(*tokens, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    loss = losses.token_mean(per_token, tokens.mask)
    return loss, _gradient(loss, tokens)


def _compiled(tokens: Tokens, *, dual: float | None, metrics: bool) -> Function | None:
    if shutil.which(COMPILER) is None:
        print(f"left out: torch.compile needs {COMPILER}")
        return None

    torch._dynamo.config.recompile_limit = 64  # one graph for each size and clip of this file

    @torch.compile(fullgraph=True, dynamic=False)
    def traced(*tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = diagnostics.ratio_stats(*tokens, clip_low=LOW, clip_high=HIGH) if metrics else {}
        per_token = losses.clipped_surrogate(*tokens, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
        return losses.token_mean(per_token, tokens[-1]), {name: metric.value() for name, metric in found.items()}

    def run() -> tuple[Tensor, Tensor]:
        loss, _ = traced(*tokens)
        return loss, _gradient(loss, tokens)

    return run


def _gradient(loss: Tensor, tokens: Tokens) -> Tensor:
    return torch.autograd.grad(loss, tokens.log_probs)[0]


def _verl(tokens: Tokens) -> Function | None:
    core, config = verl(), verl_actor(clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=DUAL)
    if core is None or config is None:
        return None
    mask = tokens.mask.float()

    def run() -> tuple[Tensor, Tensor]:
        loss, _ = core.compute_policy_loss_vanilla(
            tokens.old_log_probs, tokens.log_probs, tokens.advantages, mask, "token-mean", config
        )
        return loss, _gradient(loss, tokens)

    return run


def _trl(tokens: Tokens) -> Function | None:
    """TRL's loss is a method of its trainer: called on a stand-in that returns log-probs instead of running a model."""
    module = trl()
    if module is None:
        return None
    rows = len(tokens.mask)
    mask = tokens.mask.float()
    entropies = torch.zeros_like(mask)
    trainer = _stand_in(lambda *args, **kwargs: (tokens.log_probs, entropies, None))
    nothing, one = torch.zeros(rows, 0), torch.zeros(rows, 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing.long(),
        "prompt_mask": nothing,
        "completion_ids": one,  # only a model would read them
        "completion_mask": mask,
        "advantages": tokens.advantages[:, 0].contiguous(),
        "old_per_token_logps": tokens.old_log_probs,
        "num_items_in_batch": mask.sum(),
    }

    def run() -> tuple[Tensor, Tensor]:
        trainer._metrics["train"].clear()
        loss = module.GRPOTrainer._compute_loss(trainer, None, inputs)
        return loss, _gradient(loss, tokens)

    return run


def _stand_in(log_probs: Callable[..., tuple[Any, ...]]) -> SimpleNamespace:
    one_process = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=log_probs,
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=one_process,
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=HIGH,
        epsilon_low=LOW,
        importance_sampling_level="token",
        loss_type="dapo",
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )


def _oracle(tokens: Tokens, dual: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient, and where the latter is clear of a bound; by cases of the clip, in float64."""
    ratio = (tokens.log_probs.detach().double() - tokens.old_log_probs.double()).exp()
    a, n = tokens.advantages.double(), tokens.mask.sum()
    highest = torch.full_like(ratio, torch.inf) if dual is None else torch.full_like(ratio, dual)
    low = torch.where(a >= 0, 0.0, 1 - LOW)
    high = torch.where(a >= 0, 1 + HIGH, highest)
    inside = (ratio >= low) & (ratio <= high) & tokens.mask
    loss = torch.where(tokens.mask, -a * ratio.clamp(low, high), 0.0).sum() / n
    gradient = torch.where(inside, -a * ratio, 0.0) / n
    return loss, gradient, ((ratio - low).abs() > NEAR) & ((ratio - high).abs() > NEAR)
