"""How the corrections of the sampler/trainer gap, and the selections of tokens, are held to the laws."""

from typing import Any

import torch
from records_losses import one_more
from records_transforms import OF_DTENSORS, without_a_rule

BY_SEGMENT = {
    **without_a_rule("aten.searchsorted.Tensor"),
    "sequences may be cut": "segments of sequences that are cut are refused",
}
A_GENERATOR = (
    *("vmap is a loop", "one graph for all batch sizes", "packed tokens compile", "one graph for all packed batches"),
    *("exports with a dynamic batch", "exports packed with a dynamic batch"),
    *OF_DTENSORS,
)
"""Laws of transforms that carry no state of a torch.Generator."""

RECORDS: list[dict[str, Any]] = [
    {"name": "corrections.importance_weights", "matters": {"level": "sequence", "low": 0.99, "high": 1.01}},
    {
        "name": "corrections.importance_weights",
        "call": {"level": "sequence", "action": "mask", "low": 0.9, "high": 1.2},
        "matters": {"mean": "geometric", "action": "truncate", "all_reduce_rows": one_more},
    },
    {
        "name": "corrections.importance_weights",
        "call": {"level": "segment", "low": 0.5},
        "matters": {"level": "sequence", "mean": "geometric"},
        "exempt": BY_SEGMENT,
    },
    {
        "name": "corrections.rejection",
        "matters": {"level": "token", "statistic": "max", "high": 0.003, "all_reduce_rows": one_more},
    },
    {
        "name": "corrections.rejection",
        "call": {"estimator": "k1", "level": "segment", "statistic": "sum", "high": 1.2},
        "matters": {"estimator": "k2", "low": 0.95, "level": "sequence", "statistic": "mean"},
        "exempt": BY_SEGMENT,
    },
    {"name": "corrections.rejection", "call": {"estimator": "k2", "level": "token"}, "matters": {"high": 0.003}},
    {
        "name": "corrections.rejection",
        "call": {"level": "segment", "statistic": "max"},
        "matters": {"level": "sequence"},
        "exempt": BY_SEGMENT,
    },
    {"name": "corrections.opsm", "call": {"delta": 0.1}, "matters": {"delta": 0.5, "all_reduce_rows": one_more}},
    {
        "name": "corrections.fipo",
        "call": {"w_min": 0.5, "w_max": 2.0},
        "matters": {"half_life": 1.0, "w_min": 0.9, "w_max": 1.1, "max_ratio": 1.5, "safe_ratio": 0.5},
    },
    {"name": "corrections.fipo"},
    {"name": "corrections.tis", "matters": {"high": 1.01}},
    {"name": "corrections.icepop", "matters": {"low": 0.95, "high": 1.01}},
    {"name": "corrections.mis", "matters": {"high": 1.01, "all_reduce_rows": one_more}},
    {"name": "corrections.geometric", "matters": {"low": 0.9, "high": 1.1}},
    {
        "name": "corrections.geometric",
        "call": {"low": 0.9, "high": 1.1},
        "matters": {"all_reduce_rows": one_more},
    },
    {
        "name": "corrections.seq_mask_tis",
        "call": {"low": 0.98, "high": 1.05},
        "matters": {"low": 0.9, "high": 1.1, "all_reduce_rows": one_more},
    },
    {"name": "corrections.veto", "matters": {"low": 0.9, "high": 1.1, "all_reduce_rows": one_more}},
]


def many_more(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of a rank beside one that has a thousand tokens above each threshold."""
    return x + 1000


SELECTORS: list[dict[str, Any]] = [
    {"name": "filters.high_entropy", "matters": {"fraction": 0.5, "all_reduce": many_more}},
    {"name": "filters.kl_cov", "matters": {"fraction": 0.5, "all_reduce": many_more}},
    {"name": "filters.finite_tokens"},
    {"name": "filters.m2po", "matters": {"tau": 1.0, "all_reduce": many_more}},
    {
        "name": "filters.clip_cov",
        "call": {"fraction": 0.2, "low": -1.0, "high": 1.0},
        "matters": {
            **{"fraction": 0.4, "low": 0.0, "high": 0.1, "generator": torch.Generator().manual_seed(1)},
            **{"all_reduce": many_more, "tokens_before": 1},
        },
        "exempt": {
            "rows may be permuted": "the draw goes by the place of a token among the valid ones",
            "a batch may be spread": "the draw goes by the place of a token among the valid ones of all ranks",
            **dict.fromkeys(A_GENERATOR, "draws by a torch.Generator, whose state no transform carries"),
        },
    },
]
