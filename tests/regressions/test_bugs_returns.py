"""Returns and GAE at the edges of their shapes and parameters."""

import inspect

import pytest
import torch
from torch import Tensor

from rlprims import advantage
from rlprims.advantage import discounted_returns, gae, reinforce_pp

RETURNS = [
    f
    for name in advantage.__all__
    if inspect.isfunction(f := getattr(advantage, name))
    and {p.name for p in inspect.signature(f).parameters.values() if p.default is p.empty}
    <= {"rewards", "values", "response_mask", "old_log_probs", "rollout_log_probs"}
]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("f", RETURNS, ids=lambda f: f.__name__)
def test_v3_one_row_and_one_token_are_not_squeezed(f: type, shape: tuple[int, int]) -> None:
    """torchrl acf168e2a, ff421a331."""
    x, mask = torch.ones(shape), torch.ones(shape, dtype=torch.bool)
    data = {"rewards": x, "values": x, "old_log_probs": -x, "rollout_log_probs": -x, "response_mask": mask}
    got: Tensor = f(**{k: v for k, v in data.items() if k in inspect.signature(f).parameters})
    assert got.shape == shape
    assert got.isfinite().all()


@pytest.mark.parametrize(
    "options", [{"gamma": 0.0, "lam": 0.0}, {"gamma": 0.0, "lam": 1.0}, {"gamma": 1.0, "lam": 0.0}]
)
def test_v4_parameters_of_zero_and_one(options: dict[str, float]) -> None:
    """torchrl: an IndexError where the product of the two is 0."""
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.0, 4.0]])
    got = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), **options)
    after = torch.tensor([[1.0, 4.0, 0.0]])
    torch.testing.assert_close(got, rewards + options["gamma"] * after - values)


def test_m1_b6_gae_carries_nothing_through_padding_and_tool_output() -> None:
    """verl 033286685, SkyRL, miles#1827: bootstrapped from, or discounted through, values that belong to no token."""
    mask = torch.tensor([[True, False, False, True]])
    rewards, values = torch.tensor([[[0.0, 0.0, 0.0, 1.0]], [[0.5, 8.0, 8.0, 0.25]]])
    got = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    last = 1 - 0.25
    torch.testing.assert_close(got, torch.tensor([[0.9 * 0.25 - 0.5 + 0.72 * last, 0, 0, last]]))
    through = 0.9 * 8 - 0.5  # the first error, if what follows the token is the tool's
    assert abs(got[0, 0] - through) > 5


def test_m3_a_return_is_carried_over_tool_output_and_not_cut_there() -> None:
    """SkyRL's and verl's REINFORCE++ multiply the running return by the mask."""
    mask = torch.tensor([[True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    assert discounted_returns(rewards, mask).tolist() == [[1.0, 0.0, 1.0]]
    running, cut = torch.zeros(()), []
    for t in (2, 1, 0):
        running = (rewards[0, t] + running) * mask[0, t]
        cut.append(float(running))
    assert cut == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("tokens", [0, 1])
def test_g14_a_batch_of_one_token_is_whitened_to_zero(tokens: int) -> None:
    """verl, ROLL#475: a ValueError that ended the run."""
    mask = torch.arange(3)[None] < tokens
    assert torch.equal(reinforce_pp(torch.ones(1, 3), mask), torch.zeros(1, 3))
