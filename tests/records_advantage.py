"""How the advantage estimators are held to the laws: what to call them with, what must matter, what does not bind."""

from typing import Any

import torch

from rlprims.types import SequenceShard

STATISTICS_OF_THE_BATCH = {
    "batches may be merged": "its statistics are those of the whole batch",
    "nan stays in its group": "its statistics are those of the whole batch",
}
BY_TOKEN = {"one advantage per response": "each token has its own return and its own baseline"}


def doubled(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks with the same batch."""
    return 2 * x


def beside_another(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks, when the other has one informative response."""
    return x + 1


def doubled_in_number(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks, when the other has as many prompts, none of which passes."""
    return x * torch.tensor([2.0, 1.0], dtype=x.dtype, device=x.device)


FIRST_OF_TWO = SequenceShard(part=0, all_gather=lambda x: torch.stack([x, torch.ones_like(x)]))
"""The part before one whose recurrences begin with 1."""


def record(
    name: str,
    call: dict[str, Any] | None = None,
    matters: dict[str, Any] | None = None,
    exempt: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {"name": name, "call": call or {}, "matters": matters or {}, "exempt": exempt or {}}


RECORDS: list[dict[str, Any]] = [
    record(
        "advantage.beta_normalized",
        matters={"tolerance": 10.0, "all_reduce": doubled_in_number},
        exempt={
            "a shift of a group cancels": "rewards are 0 or 1",
            "nan stays in its group": "the Beta distribution is that of all prompts of the batch",
        },
    ),
    record("advantage.clip", {"low": -0.5, "high": 0.8}, {"low": -0.2, "high": 0.3}),
    record("advantage.clip", {"low": 0.1, "high": 0.8}),
    record(
        "advantage.gdpo",
        {"weights": (1.0, 0.5)},
        {
            "weights": (1.0, 2.0),
            "normalize_std": False,
            "ddof": 0,
            "eps": 0.1,
            "singleton": "raw",
            "tolerance": 10.0,
            "whiten_over": "none",
            "whiten_eps": 0.1,
            "all_reduce": doubled,
        },
        STATISTICS_OF_THE_BATCH,
    ),
    record("advantage.gdpo", {"weights": (1.0, 0.5), "whiten_over": "tokens"}, exempt=STATISTICS_OF_THE_BATCH),
    record("advantage.gdpo", {"weights": (1.0, 0.5), "whiten_over": "none"}),
    record(
        "advantage.gigpo",
        matters={
            "omega": 0.5,
            "gamma": 0.5,
            "normalize_std": False,
            "ddof": 0,
            "eps": 0.1,
            "tolerance": 10.0,
        },
        exempt={
            **BY_TOKEN,
            "equal rewards give zero": "steps that end sooner have a higher return",
            "a shift of a group cancels": "steps that end sooner have more of it",
        },
    ),
    record("advantage.gigpo", {"gamma": 1.0, "normalize_std": False}, exempt=BY_TOKEN),
    record(
        "advantage.gpg",
        matters={"informative": "nonzero_reward", "singleton": "raw", "tolerance": 10.0, "all_reduce": beside_another},
        exempt={"batches may be merged": "the share that teaches is that of the whole batch"},
    ),
    record("advantage.grpo", matters={"baseline": "leave_one_out", "std_over": "batch"}),
    record("advantage.grpo", {"baseline": "leave_one_out"}),
    record(
        "advantage.grpo",
        {"std_over": "batch"},
        {"all_reduce": doubled},
        {
            **STATISTICS_OF_THE_BATCH,
            "a shift of a group cancels": "the deviation of raw rewards grows with the distance between prompts",
        },
    ),
    record("advantage.grpo", {"std_over": "batch_centred"}, exempt=STATISTICS_OF_THE_BATCH),
    record("advantage.length_adaptive_gae", {"alpha": 0.4}, {"gamma": 0.9, "alpha": 0.3, "shard": FIRST_OF_TWO}),
    record("advantage.length_adaptive_gae"),
    record(
        "advantage.maxrl",
        matters={"eps": 0.1},
        exempt={"a shift of a group cancels": "divides by the mean, which the shift moves"},
    ),
    record("advantage.opo", matters={"singleton": "raw"}),
    record(
        "advantage.optimal_token_baseline", matters={"align": "columns", "alone": "raw", "eps": 1.0}, exempt=BY_TOKEN
    ),
    record("advantage.optimal_token_baseline", {"align": "columns"}, exempt=BY_TOKEN),
    record("advantage.optimal_value", matters={"beta": 2.0}),
    record("advantage.optimal_value", {"beta": 0.01}),
    record("advantage.pass_at_k", matters={"normalize_std": True, "tolerance": 10.0}),
    record("advantage.pass_at_k", {"normalize_std": True}, {"ddof": 0, "eps": 0.1}),
    record("advantage.pkpo", {"k": 2}, {"k": 1, "baseline": "leave_one_out"}),
    record("advantage.pkpo", {"k": 1, "baseline": "leave_one_out"}),
    record("advantage.pkpo", {"k": 2, "baseline": "leave_one_out"}),
    record(
        "advantage.pkpo",
        {"k": 3, "baseline": "none"},
        exempt={
            "equal rewards give zero": "has no baseline",
            "a shift of a group cancels": "has no baseline",
        },
    ),
    record("advantage.positive_negative", matters={"positive": 0.0, "negative": 0.5}),
    record(
        "advantage.prime",
        matters={"gamma": 0.9, "process_weight": 0.5},
        exempt={
            **BY_TOKEN,
            "equal rewards give zero": "process rewards differ where outcomes are equal",
            "a scale passes or cancels": "process rewards are not scaled with the outcome",
        },
    ),
    record(
        "advantage.quantile",
        matters={"level": 0.9, "normalize_std": False, "ddof": 0, "eps": 0.1, "tolerance": 10.0},
    ),
    record(
        "advantage.reinforce_pp",
        matters={"gamma": 0.9, "ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
    record(
        "advantage.reinforce_pp_baseline",
        matters={"singleton": "raw", "ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
    record(
        "advantage.rtmc",
        matters={"gamma": 0.5, "prior": 0.0},
        exempt={
            **BY_TOKEN,
            "equal rewards give zero": "steps that end sooner have a higher return",
            "a shift of a group cancels": "steps that end sooner have more of it",
        },
    ),
    record("advantage.rtmc", {"gamma": 1.0, "prior": 1.0}, exempt=BY_TOKEN),
    record("advantage.td_lambda", matters={"gamma": 0.9, "lam": 0.5, "shard": FIRST_OF_TWO}),
    record("advantage.td_lambda", {"gamma": 0.99, "lam": 0.0}),
    record("advantage.tree", matters={"normalize_std": False, "ddof": 0, "eps": 0.1, "tolerance": 10.0}),
    record("advantage.tree", {"normalize_std": False}),
    record(
        "advantage.turn_grpo",
        matters={
            "turn_weight": 0.5,
            "gamma": 0.5,
            "normalize_std": False,
            "ddof": 0,
            "eps": 0.1,
            "tolerance": 10.0,
        },
        exempt=BY_TOKEN,
    ),
    record(
        "advantage.turn_grpo",
        {"normalize_std": False},
        exempt={**BY_TOKEN, "a scale passes or cancels": "rewards of turns are not scaled with the outcome"},
    ),
    record("advantage.vine", matters={"gamma": 0.5}),
    record(
        "advantage.vtrace",
        matters={
            **{"gamma": 0.9, "lam": 0.5, "clip_rho": 0.8, "clip_c": 0.8, "clip_pg_rho": 0.8},
            "shard": FIRST_OF_TWO,
        },
    ),
    record("advantage.vtrace", {"gamma": 0.9, "lam": 0.5, "clip_rho": 2.0, "clip_pg_rho": 3.0}),
    record(
        "advantage.vtrace_returns",
        matters={"gamma": 0.9, "lam": 0.5, "clip_rho": 0.8, "clip_c": 0.8, "shard": FIRST_OF_TWO},
    ),
]
"""For ``check_advantage``: ``name``, ``call``, ``matters`` and ``exempt`` mean what they do in test_laws.Record."""
