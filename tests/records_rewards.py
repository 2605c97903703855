"""How score shaping, filters and selections of rows are held to the laws."""

from typing import Any


def record(
    name: str,
    call: dict[str, Any] | None = None,
    matters: dict[str, Any] | None = None,
    exempt: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {"name": name, "call": call or {}, "matters": matters or {}, "exempt": exempt or {}}


SHAPING: list[dict[str, Any]] = [
    record("rewards.combine", {"weights": (1.0, 0.5)}, {"weights": (1.0, 2.0)}),
    record("rewards.combine"),
    record(
        "rewards.cosine_length",
        {"max_length": 5},
        {
            "max_length": 7,
            "correct_short": 2.0,
            "correct_long": 0.2,
            "wrong_short": -3.0,
            "wrong_long": -0.1,
            "correct_above": 0.0,
        },
    ),
    record("rewards.implicit_process", matters={"beta": 0.5}),
    record("rewards.linear_cost", matters={"output": 0.5, "context": 0.0, "turns": 0.5}),
    record("rewards.potential_shaping", matters={"gamma": 0.9}),
    record("rewards.potential_shaping", {"gamma": 0.0}),
    record("rewards.relative_length", matters={"weight": 0.5, "correct_above": 0.0}),
    record("rewards.repetition_penalty", matters={"ngram": 2, "penalty_factor": 0.5}),
    record("rewards.repetition_penalty", {"ngram": 1}),
    record("rewards.repetition_penalty", {"ngram": 4}),
    record("rewards.rescale", {"low": -1.0, "high": 2.0}, {"shift": 0.5, "scale": 2.0, "low": -0.1, "high": 0.1}),
    record(
        "rewards.solve_rate_length",
        {"max_length": 6},
        {"max_length": 5, "coefficient": 0.1, "correct_above": 0.0},
    ),
    record(
        "rewards.truncation_penalty",
        {"scale": 0.5, "penalty": 0.2},
        {"scale": 0.3, "penalty": 1.0, "reasons": ("context",)},
    ),
    # Rows, and not whole groups: a filter's laws do not bind it.
    record("filters.max_variance", {"keep": 2}, {"keep": 3}),
]
FILTERS: list[dict[str, Any]] = [
    record(
        "filters.completed",
        matters={"max_share": 0.5, "reasons": ("length",)},
        exempt=dict.fromkeys(("equal scores are dropped", "unknown scores are dropped"), "reads no scores"),
    ),
    record(
        "filters.solve_rate",
        {"low": -0.5, "high": 0.5},
        {"low": 0.0, "high": 0.1},
        exempt={"equal scores are dropped": "asks how high the mean is, not whether scores differ"},
    ),
    record(
        "filters.varied_components",
        matters={"tolerance": 0.9},
        exempt={"wrong shapes are refused": "one reward more is as good"},
    ),
]
