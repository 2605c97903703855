"""Masks and padding: what peers read where nothing stands. Entry names are those of README.md here."""

import torch

from rlprims.advantage import discounted_returns, grpo, whiten
from rlprims.corrections import fipo
from rlprims.diagnostics import mean_over_tokens
from rlprims.losses import cispo, gspo, seq_mean_token_mean
from rlprims.rewards import kl_penalty

NAN, INF = torch.nan, torch.inf
M = torch.tensor([[True, True, True], [True, False, False]])


def test_m4_a_masked_token_stays_at_zero_when_the_batch_is_whitened() -> None:
    """verl's GAE subtracts the mean from padding too."""
    x = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]])
    assert torch.equal(whiten(x, M)[~M], torch.zeros(2))
    peer = (x - x[M].mean()) / x[M].std()
    assert (peer[~M].abs() > 1).all()


def test_m5_nan_at_a_masked_token_is_not_in_the_mean() -> None:
    """verl 5cbad8379, SkyRL#1633: a product with the mask keeps NaN."""
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, INF]])
    assert seq_mean_token_mean(x, M) == 3
    assert ((x * M).sum(-1) / M.sum(-1)).mean().isnan()


def test_m6_what_is_masked_after_the_exponential_has_no_gradient_either() -> None:
    """verl's CISPO, DPPO, DRO and cov losses, TRL: the value is clean, the gradient is 0 · NaN."""

    def gradient(mask_inputs: bool) -> torch.Tensor:
        x = torch.tensor([[0.1, -INF, 800.0]], requires_grad=True)
        mask = torch.tensor([[True, False, False]])
        if mask_inputs:
            cispo(x, torch.zeros(1, 3), torch.ones(1, 3), mask).sum().backward()
        else:
            torch.where(mask, -x.exp() * x, 0.0).sum().backward()
        assert x.grad is not None
        return x.grad

    assert gradient(mask_inputs=True)[0, 1:].tolist() == [0, 0]
    assert gradient(mask_inputs=False).isnan().any()


def test_m9_kl_of_padding_and_tool_output_is_in_no_return() -> None:
    """slime 166441911."""
    mask = torch.tensor([[True, False, True, False]])
    old, ref = torch.tensor([[[-1.0, 7.0, -1.0, NAN]], [[-2.0, -9.0, -1.5, 3.0]]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    got = discounted_returns(kl_penalty(rewards, old, ref, mask, kl_coef=0.1), mask)
    torch.testing.assert_close(got, torch.tensor([[0.85, 0.0, 0.95, 0.0]]))
    peer = (rewards - 0.1 * (old - ref))[:, :3].flip(-1).cumsum(-1).flip(-1)
    assert peer[0, 0] < 0


def test_m14_an_empty_row_moves_no_metric() -> None:
    """SkyRL 62a6e1203, verl's current_kl: a mean over rows counts the empty ones, a plain mean the padding."""
    entropies = torch.tensor([[1.0, 2.0, 3.0], [6.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.cat([M, torch.zeros(1, 3, dtype=torch.bool)])
    assert mean_over_tokens(entropies, mask).value() == mean_over_tokens(entropies[:2], M).value() == 3
    per_row = (entropies * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    assert per_row.mean() != per_row[:2].mean()
    assert entropies.mean() < 2


def test_m16_one_masked_log_prob_moves_no_sequence_ratio() -> None:
    """Soup#723: the mean of the log-ratios took padding in."""
    old, a = torch.zeros(2, 3), torch.ones(2, 3)
    new = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.0, 0.0]])
    changed = torch.where(M, new, 5.0)
    assert torch.equal(gspo(new, old, a, M), gspo(changed, old, a, M))
    assert not torch.equal((new - old).mean(-1), (changed - old).mean(-1))


def test_b29_a_nan_reward_in_the_padding_poisons_no_group() -> None:
    """verl's outcome estimators sum the whole row."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, NAN, NAN]])
    got = grpo(rewards, torch.tensor([0, 0]), M)
    torch.testing.assert_close(got[:, 0], torch.tensor([0.7071, -0.7071]), rtol=0, atol=1e-4)
    assert rewards.sum(-1).isnan().any()


def test_m19_tool_output_is_no_distance_into_the_future() -> None:
    """ms-swift PR 9328: FIPO's γ^(k − t) counts columns, so what follows a tool call of 64 tokens counts a quarter."""
    d = torch.zeros(1, 66, dtype=torch.float64)
    d[0, -1] = 0.1
    mask = torch.ones_like(d, dtype=torch.bool)
    mask[0, 1:-1] = False
    old, a = torch.zeros_like(d), torch.ones_like(d)
    f = fipo(torch.where(mask, d, NAN), old, a, mask).values
    gamma = 2 ** (-1 / 32)
    torch.testing.assert_close(f[0, 0].log(), d.new_tensor(0.1 * gamma))
    without_tool = fipo(d[:, [0, -1]], old[:, :2], a[:, :2], mask[:, [0, -1]]).values
    assert torch.equal(f[:, [0, -1]], without_tool)
    columns = torch.arange(66)
    peer = (torch.where(mask, d, 0.0) * gamma**columns).sum().exp()
    assert peer.log() < 0.026
