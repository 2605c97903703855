"""The trainer's probability over the sampler's: per token, turn or response, truncated or masked."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.corrections import importance_weights
from rlprims.testing import check_weights
from tests.records import BY_SEGMENT, Record, one_more

RECORDS = [
    Record("corrections.importance_weights", check_weights, matters={"level": "sequence", "low": 0.99, "high": 1.01}),
    Record(
        "corrections.importance_weights",
        check_weights,
        call={"level": "sequence", "action": "mask", "low": 0.9, "high": 1.2},
        matters={"mean": "geometric", "action": "truncate", "all_reduce_rows": one_more},
    ),
    Record(
        "corrections.importance_weights",
        check_weights,
        call={"level": "segment", "low": 0.5},
        matters={"level": "sequence", "mean": "geometric"},
        exempt=BY_SEGMENT,
    ),
]


def weights(*ratios: float, **options) -> list[float]:
    """Of one response with these token ratios."""
    x = torch.tensor([ratios], dtype=torch.float64).log()
    mask = torch.ones_like(x, dtype=torch.bool)
    return importance_weights(x, torch.zeros_like(x), mask, **options).values[0].tolist()


def test_the_direction_is_trainer_over_sampler() -> None:
    trainer, sampler = (torch.tensor([[p]]).log() for p in (0.6, 0.4))
    assert importance_weights(trainer, sampler, torch.tensor([[True]])).values.item() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.25, 1.5, 2.0, 2.0]),
        ({"low": 0.5, "high": 5.0}, [0.5, 1.5, 4.0, 5.0]),
        ({"action": "mask", "low": 0.5, "high": 5.0}, [0.0, 1.5, 4.0, 0.0]),  # IcePop
        ({"action": "mask"}, [0.25, 1.5, 0.0, 0.0]),
    ],
)
def test_tokens(options: dict, want: list[float]) -> None:
    assert weights(0.25, 1.5, 4.0, 8.0, **options) == pytest.approx(want)


@pytest.mark.parametrize(
    ("ratios", "options", "want"),
    [
        ((0.5, 3.0), {}, 1.5),
        ((2.0, 3.0), {}, 2.0),
        ((2.0, 3.0), {"action": "mask"}, 0.0),
        ((0.5, 3.0), {"mean": "geometric"}, math.sqrt(1.5)),
        ((2.0, 8.0), {"mean": "geometric", "high": 5.0}, 4.0),
        ((2.0, 8.0), {"mean": "geometric", "action": "mask"}, 0.0),
    ],
)
def test_responses(ratios: tuple[float, ...], options: dict, want: float) -> None:
    assert weights(*ratios, level="sequence", **options) == pytest.approx([want, want])


def test_a_product_is_exponential_in_the_length() -> None:
    ratios = [math.exp(0.002)] * 1000
    assert weights(*ratios, level="sequence", high=10.0)[0] == pytest.approx(7.389, abs=1e-3)
    assert weights(*ratios, level="sequence", mean="geometric")[0] == pytest.approx(1.002, abs=1e-5)


@pytest.mark.parametrize(
    ("turns", "options", "want"),
    [
        ([0, 0, 1, 1], {}, [1.5, 1.5, 2.0, 2.0]),
        ([0, 0, 1, 1], {"mean": "geometric"}, [math.sqrt(1.5)] * 2 + [2.0] * 2),
        ([5, 1, 1, 5], {"high": 20.0}, [0.5, 12.0, 12.0, 1.0]),  # the same number after another is another turn
        ([0, 0, 1, 1], {"action": "mask"}, [1.5, 1.5, 0.0, 0.0]),
        (None, {"high": 20.0}, [6.0] * 4),
    ],
)
def test_turns(turns: list[int] | None, options: dict, want: list[float]) -> None:
    ids = None if turns is None else torch.tensor([turns])
    assert weights(0.5, 3.0, 4.0, 1.0, level="segment", turn_ids=ids, **options) == pytest.approx(want)


def test_a_turn_goes_on_after_a_tool_call_and_ends_with_its_response() -> None:
    """Masked tokens neither weigh nor end a turn, whatever their id; packed neighbours share no turn."""
    mask, turns = torch.tensor([True, False, True, True, True]), torch.tensor([0, 9, 0, 0, 1])
    x = torch.tensor([2.0, 7.0, 3.0, 5.0, 0.5], dtype=torch.float64).log()
    cu = torch.tensor([0, 3, 5])
    got = importance_weights(x, torch.zeros_like(x), mask, cu, turns, level="segment", high=10.0).values
    assert got.tolist() == pytest.approx([6.0, 0.0, 6.0, 5.0, 0.5])


def test_trl_1_16() -> None:
    """trl:public:vllm_is_ratio/004, sequence_truncate at 2.0: the first two responses."""
    for log_ratios, want in (
        ([-0.201782, 0.167439, -0.423448, 0.324876, 0.10345, -0.049683], 0.9239033),
        ([0.312865, 0.438809], 2.0),
    ):
        got = weights(*torch.tensor(log_ratios, dtype=torch.float64).exp().tolist(), level="sequence")
        assert got == pytest.approx([want] * len(log_ratios), abs=2e-6)


def test_importance_weights_have_no_gradient() -> None:
    x: Tensor = torch.zeros(1, 2, requires_grad=True)
    assert not importance_weights(x, x + 1, torch.ones(1, 2, dtype=torch.bool)).values.requires_grad


def test_a_nan_of_the_sampler_propagates() -> None:
    nan = torch.tensor([[torch.nan, 0.0]])
    for action in ("truncate", "mask"):
        got = importance_weights(torch.zeros(1, 2), nan, torch.ones(1, 2, dtype=torch.bool), action=action)
        assert got.values.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(
    "options",
    [
        {"level": "turn"},
        {"mean": "harmonic"},
        {"mean": "geometric"},
        {"action": "veto"},
        {"low": 1.5},
        {"high": 0.5},
        {"low": -1.0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        weights(1.0, **options)


def test_the_set_of_corrected_gaps_cannot_change() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(AttributeError, match="add"):
        importance_weights(one, one, torch.tensor([[True]])).corrected.add("other")  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", ["token", "segment", "sequence"])
def test_turns_of_another_shape_are_refused(level: str) -> None:
    one = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="turn_ids has shape"):
        importance_weights(one, one, one == 0, turn_ids=torch.zeros(1, 3, dtype=torch.int64), level=level)
