"""Gradients, and a peer's aggregation by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlprims.layout import sequence_lengths, sequence_sum, to_tokens
from rlprims.losses import (
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rlprims.types import Totals
from tests.golden_cases import Answer, Call, Case


def full(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def slope(y: Tensor, x: Tensor, cotangent: Tensor | None = None) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y) if cotangent is None else cotangent, retain_graph=True)[0]


def with_gradient(loss: Tensor, x: Tensor, name: str) -> Answer:
    return {"loss": loss.detach(), name: slope(loss, x)}


def aggregate(mode: str, losses: Tensor, mask: Tensor, args: Mapping[str, Any], rows: int | None = None) -> Tensor:
    """A peer's mode, with the totals that it was told; its rank factor stands outside."""
    ranks = args.get("dp_size", 1)
    tokens, sequences = args.get("batch_num_tokens"), args.get("global_batch_size", rows)
    totals = None
    if tokens is not None or sequences is not None:
        own = int((mask.sum(-1) > 0).sum())
        totals = Totals(
            tokens=mask.sum() if tokens is None else int(tokens),
            sequences=own if sequences is None else int(sequences),
            groups=0,
        )
    if mode == "token-sum":
        return token_sum(losses, mask) * ranks
    if mode == "seq-mean-token-sum-norm":
        length = args.get("loss_scale_factor") or args.get("max_completion_length") or mask.shape[-1]
        return seq_mean_token_sum_norm(losses, mask, totals=totals, length=length) * ranks
    functions = {
        "token-mean": token_mean,
        "seq-mean-token-sum": seq_mean_token_sum,
        "seq-mean-token-mean": seq_mean_token_mean,
    }
    return functions[mode](losses, mask, totals=totals) * ranks


@dataclass(frozen=True)
class Policy:
    """What a peer gives to its policy loss, by our names."""

    log_probs: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor


NAMES = {
    "verl": ("log_prob", "old_log_prob", "response_mask", "grad_log_prob"),
    "trl": ("per_token_logps", "old_per_token_logps", "completion_mask", "grad_log_prob"),
    "openrlhf": ("log_probs", "old_log_probs", "action_mask", "grad_log_prob"),
    "skyrl": ("log_probs", "old_log_probs", "loss_mask", "grad_log_probs"),
    "slime": ("log_probs", "old_log_probs", "mask", "grad_log_probs"),
    "nemo_rl": ("next_token_logprobs", "prev_logprobs", "token_mask", "grad_logprobs"),
    "areal": ("logprobs", "proximal_logprobs", "loss_mask", "grad_logprobs"),
    "prime_rl": ("trainer_logprobs", "inference_logprobs", "loss_mask", "grad_logprobs"),
}
"""What each peer calls the log-probs, the old ones, the mask and the gradient."""

Losses = Callable[[Case, Policy], Tensor]


def policy_of(c: Case) -> Policy:
    log_probs, old, mask, _ = NAMES[c.peer]
    valid, advantages = c.inputs[mask].bool(), c.inputs["advantages"]
    advantages = to_tokens(advantages, valid) if advantages.dim() == 1 else advantages
    constant = c.inputs.get(old, c.inputs.get("old_logprobs"))
    return Policy(leaf(c.inputs[log_probs]), constant, advantages, valid)


def mode_of(c: Case) -> str:
    """The peer's aggregation: by name in verl, by the kind of loss elsewhere."""
    if c.peer == "skyrl":
        return "token-sum"
    if c.peer == "trl":
        modes = {"luspo": "seq-mean-token-sum", "dr_grpo": "seq-mean-token-sum-norm"}
        means = dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean")
        return {**modes, **means}.get(c.args["loss_type"], "token-mean")
    by_level = "token-mean" if c.args.get("token_level_loss", True) else "seq-mean-token-mean"
    return c.args.get("loss_agg_mode", by_level)


def objective(losses: Losses, mode: Callable[[Case], str] = mode_of) -> Call:
    """The peer's loss, aggregated as the peer does. TRL counts rows without tokens too."""

    def call(c: Case) -> Answer:
        p = policy_of(c)
        loss = aggregate(mode(c), losses(c, p), p.mask, c.args, len(p.mask) if c.peer == "trl" else None)
        return with_gradient(loss, p.log_probs, NAMES[c.peer][3])

    return call


def per_token(losses: Losses, name: str) -> Call:
    """A peer that returns the losses of the tokens, and the gradient of their sum."""

    def call(c: Case) -> Answer:
        p = policy_of(c)
        got = losses(c, p)
        return {name: got.detach(), NAMES[c.peer][3]: slope(got, p.log_probs)}

    return call


def as_one_token(losses: Losses) -> Losses:
    """Each response is one token, of the mean log-ratio and the mean advantage, in a batch of width one."""

    def call(c: Case, p: Policy) -> Tensor:
        lengths = sequence_lengths(p.mask).clamp(min=1)
        means = ((sequence_sum(x, p.mask) / lengths)[:, None] for x in (p.log_probs, p.old_log_probs, p.advantages))
        whole = Policy(*means, full(lengths)[:, None])
        return to_tokens(losses(c, whole)[:, 0], p.mask)

    return call
