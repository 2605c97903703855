"""Means over tokens, sequences and prompts."""

from itertools import pairwise

import torch
from torch import Tensor

from rlprims.losses import (
    prompt_token_mean,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean,
)
from rlprims.types import Totals
from tests.golden_calls.common import aggregate, leaf, slope, with_gradient
from tests.golden_cases import Answer, Calls, Case


def agg_loss(c: Case) -> Answer:
    x = leaf(c.inputs["loss_mat"])
    return with_gradient(
        aggregate(c.args["loss_agg_mode"], x, c.inputs["loss_mask"].bool(), c.args), x, "grad_loss_mat"
    )


def agg_loss_microbatch(c: Case) -> Answer:
    x, mask, cuts = c.inputs["loss_mat"], c.inputs["loss_mask"].bool(), c.args["cuts"]
    parts = [aggregate(c.args["loss_agg_mode"], x[a:b], mask[a:b], c.args) for a, b in pairwise(cuts)]
    return {
        "loss_whole": aggregate(c.args["loss_agg_mode"], x, mask, c.args),
        "loss_parts": torch.stack(parts).reshape(c.outputs["loss_parts"].shape),
    }


def mean_of_micro_batches(losses: Tensor, mask: Tensor, size: int) -> Tensor:
    """What a mean per micro-batch comes to; the rows of an incomplete one are dropped."""
    starts = range(0, len(losses) - size + 1, size)
    return torch.stack([token_mean(losses[i : i + size], mask[i : i + size]) for i in starts]).mean()


def skyrl_advantage_scaling(c: Case) -> Answer:
    """SkyRL scales advantages so that a sum is the mean: by the gradient of our mean."""
    mask, losses = c.inputs["loss_mask"].bool(), leaf(c.inputs["advantages"])
    bounds = c.args["prompt_boundaries"]
    ids = torch.tensor([i for i, (a, b) in enumerate(bounds) for _ in range(b - a)])
    loss = {
        "token_mean": lambda: token_mean(losses, mask),
        "sequence_mean": lambda: seq_mean_token_mean(losses, mask, totals=Totals(0, len(mask), 0)),
        "seq_mean_token_sum_norm": lambda: seq_mean_token_sum_norm(
            losses, mask, totals=Totals(0, len(mask), 0), length=c.args["max_seq_len"]
        ),
        "prompt_mean": lambda: prompt_token_mean(losses, ids, mask),
        "token_mean_legacy": lambda: mean_of_micro_batches(losses, mask, c.args["micro_batch_size"]),
    }[c.args["loss_reduction"]]()
    return {"scaled": slope(loss, losses) * c.inputs["advantages"]}


CALLS: Calls = {
    ("verl", "agg_loss"): agg_loss,
    ("verl", "agg_loss_microbatch"): agg_loss_microbatch,
    ("skyrl", "skyrl_advantage_scaling"): skyrl_advantage_scaling,
}
