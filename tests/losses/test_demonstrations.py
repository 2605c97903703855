"""Losses on what others wrote: LUFFY, CHORD-phi and DFT."""

import math

import pytest
import torch

from rlprims.losses import chord_phi, clipped_surrogate, dft, luffy, nll
from rlprims.testing import check_loss
from tests.records import DETACHED_WEIGHT, Record

RECORDS = [
    Record("losses.dft", check_loss, exempt=DETACHED_WEIGHT),
    Record("losses.chord_phi", check_loss, exempt=DETACHED_WEIGHT),
    Record(
        "losses.luffy",
        check_loss,
        matters={"gamma": 0.5, "clip_low": 0.1, "clip_high": 0.28},
        exempt={"on policy it is reinforce": "an expert's tokens have no ratio to the policy"},
    ),
]

P = torch.tensor([[0.5, 0.1, 0.9, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])
EXPERT = torch.tensor([[True, True, False, True]])


def test_dft_is_the_gradient_of_the_probability() -> None:
    x = P.log().requires_grad_()
    loss = dft(x, MASK)
    loss.sum().backward()
    expected = [[0.5 * math.log(2), 0.1 * math.log(10), -0.9 * math.log(0.9), 0]]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(x.grad, torch.tensor([[-0.5, -0.1, -0.9, 0]], dtype=torch.float64))


def test_the_weight_of_chord_phi_is_largest_in_the_middle() -> None:
    x = P.log().requires_grad_()
    loss = chord_phi(x, MASK)
    loss.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-0.25, -0.09, -0.09, 0]], dtype=torch.float64))
    torch.testing.assert_close(loss, 0.25 * nll(P.log(), MASK) * torch.tensor([[1, 0.36, 0.36, 0]]))


@pytest.mark.parametrize("loss", [dft, chord_phi])
def test_a_certain_token_has_no_gradient(loss) -> None:
    assert not loss(torch.zeros(1, 3), MASK[:, :3]).any()


class TestLuffy:
    old = torch.tensor([[math.nan, math.nan, 0.5, 0.5]], dtype=torch.float64)  # of what an expert wrote there is none
    advantages = torch.tensor([[2.0, -1.0, 1.0, 5.0]], dtype=torch.float64)

    def run(self, **options):
        x = P.log().requires_grad_()
        loss = luffy(x, self.old.log(), self.advantages, EXPERT, MASK, **options)
        loss.sum().backward()
        return loss.detach(), x.grad

    def test_by_hand(self) -> None:
        """The expert's tokens: −2 · 5/6 and 1 · 1/2; the policy's own, of ratio 1.8, is clipped at 1.2."""
        loss, gradient = self.run()
        torch.testing.assert_close(loss, torch.tensor([[-5 / 3, 0.5, -1.2, 0]], dtype=torch.float64))
        # By log p: −A γ p / (p + γ)², which is −2 · 0.05 / 0.36 and 1 · 0.01 / 0.04
        torch.testing.assert_close(gradient, torch.tensor([[-0.1 / 0.36, 0.25, 0, 0]], dtype=torch.float64))

    def test_gamma_is_where_f_is_a_half(self) -> None:
        assert float(self.run(gamma=0.5)[0][0, 0]) == pytest.approx(-2 / 2)
        with pytest.raises(ValueError, match="gamma=0, expected a number above 0"):
            self.run(gamma=0)

    def test_the_slope_is_steepest_for_what_the_policy_finds_unlikely(self) -> None:
        """With γ = 0.1, f'(p) = γ / (p + γ)²: 30 times as steep at 0.01 as at 0.5."""
        p = torch.tensor([[0.01, 0.5]], dtype=torch.float64, requires_grad=True)
        every = torch.ones(1, 2, dtype=torch.bool)
        luffy(p.log(), p.detach().log(), torch.ones(1, 2), every, every).sum().backward()
        assert float(p.grad[0, 0] / p.grad[0, 1]) == pytest.approx((0.6 / 0.11) ** 2)

    def test_nothing_clips_an_expert(self) -> None:
        """With π of the expert taken for 1 the ratio is p, which a clip at 0.8 to 1.2 would stop from 0.8 up."""
        _, gradient = self.run(clip_low=0.0, clip_high=0.0)
        assert gradient[0, 0] < 0
        assert gradient[0, 1] > 0

    def test_without_an_expert_it_is_ppo(self) -> None:
        old, nobody = torch.full_like(P, -1.0), torch.zeros_like(MASK)
        mine = luffy(P.log(), old, self.advantages, nobody, MASK, clip_high=0.28)
        assert torch.equal(mine, clipped_surrogate(P.log(), old, self.advantages, MASK, clip_high=0.28))

    def test_a_mask_of_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expert_mask has shape"):
            luffy(P.log(), P.log(), self.advantages, torch.tensor([True]), MASK)
