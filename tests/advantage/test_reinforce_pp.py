"""REINFORCE++ and its baseline."""

import pytest
import torch

from rlprims.advantage import reinforce_pp, reinforce_pp_baseline
from rlprims.testing import check_advantage
from tests.records import STATISTICS_OF_THE_BATCH, Record, doubled

RECORDS = [
    Record(
        "advantage.reinforce_pp",
        check_advantage,
        matters={"gamma": 0.9, "ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
    Record(
        "advantage.reinforce_pp_baseline",
        check_advantage,
        matters={"singleton": "raw", "ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
]


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def full(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def test_a_cost_per_token_is_charged_to_the_tokens_before() -> None:
    # outcome 1, KL 0.1 a token: returns 0.6, 0.7, 0.8, 0.9 with σ² = 0.05/3
    got = reinforce_pp(row(-0.1, -0.1, -0.1, 0.9), full(1, 4), eps=0.0)
    assert got[0].tolist() == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6)


@pytest.mark.parametrize(
    ("ddof", "want"),
    [
        (1, [[0.261116, 1.305582], [-0.783349, -0.783349]]),  # verl 0.9.1
        (0, [[0.301511, 1.507557], [-0.904534, -0.904534]]),  # OpenRLHF 0.11.0
    ],
)
def test_a_discounted_return_whitened(ddof: int, want: list[list[float]]) -> None:
    # returns 0.5, 1, 0, 0: mean 0.375, squares 0.6875
    got = reinforce_pp(torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64), full(2, 2), gamma=0.5, ddof=ddof)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=0, atol=2e-6)


def test_credit_crosses_a_tool_call() -> None:
    """verl 0.9.1 carries it; SkyRL (a9564572e) cuts it, and the first token would get what the second row gets."""
    rewards = torch.tensor([[0.0, 7.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, False, True]])
    got = reinforce_pp(rewards, mask, eps=0.0)
    x = 0.75**0.5
    torch.testing.assert_close(got, torch.tensor([[x, 0, x], [-x, 0, -x]], dtype=torch.float64), rtol=0, atol=1e-12)


def test_equal_rewards_give_zero() -> None:
    """verl 0.9.1 answers −0.51 for rewards of 1000.1 in float32."""
    rewards = torch.zeros(6, 4)
    rewards[:, -1] = 1000.1
    assert (reinforce_pp(rewards, full(6, 4)) == 0).all()


class TestBaseline:
    rewards = torch.tensor([[1.0], [0.0], [5.0], [2.0]], dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 1])

    @pytest.mark.parametrize(
        ("ddof", "want"),
        [
            (1, [0.387298, -0.387298, 1.161895, -1.161895]),  # verl 0.9.1
            (0, [0.447214, -0.447214, 1.341641, -1.341641]),  # OpenRLHF 0.11.0, NeMo-RL 7ea279abf
        ],
    )
    def test_two_prompts(self, ddof: int, want: list[float]) -> None:
        # centred ±0.5 and ±1.5: squares 5
        got = reinforce_pp_baseline(self.rewards, self.ids, full(4, 1), ddof=ddof)
        assert got[:, 0].tolist() == pytest.approx(want, abs=1e-6)

    def test_long_responses_count_for_more(self) -> None:
        # 0.5 once, −0.5 three times, 0 twice: mean −1/6, so that the group of equal rewards is above it
        rewards = torch.tensor([[1.0, 9, 9], [0, 0, 0], [1, 9, 9], [1, 9, 9]], dtype=torch.float64)
        mask = torch.tensor([[True, False, False], [True, True, True], [True, False, False], [True, False, False]])
        got = reinforce_pp_baseline(rewards, self.ids, mask)
        assert got[2, 0] == got[3, 0] > 0
        assert got[mask].mean().abs() < 1e-12
        assert got[mask].var() == pytest.approx(1)

    def test_a_batch_of_equal_rewards_gives_zero(self) -> None:
        rewards = torch.full((4, 1), 1000.1)
        assert (reinforce_pp_baseline(rewards, self.ids, full(4, 1)) == 0).all()

    def test_a_group_of_one_may_keep_its_reward(self) -> None:
        """verl 0.9.1: x = 3, −0.5, 0.5, whose mean is 1 and variance 3.25."""
        rewards = torch.tensor([[3.0], [1.0], [2.0]], dtype=torch.float64)
        got = reinforce_pp_baseline(rewards, torch.tensor([1, 0, 0]), full(3, 1), singleton="raw")[:, 0]
        assert got.tolist() == pytest.approx([x / 3.25**0.5 for x in (2, -1.5, -0.5)])

    def test_rows_may_be_left_out_of_the_mean(self) -> None:
        valid = torch.tensor([True, True, True, False])
        got = reinforce_pp_baseline(self.rewards, self.ids, full(4, 1), valid_rows=valid, eps=0.0)
        # the last group has one valid row: no baseline, 0; over the three that count σ² = 0.5 / 2
        assert got[:, 0].tolist() == pytest.approx([1, -1, 0, 0])
