"""The names of docs/papers.md that are options of ours: what their papers and TRL compute, from what we have."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rlprims import algorithms, losses
from rlprims.fit.config import FitConfig

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text()


@pytest.fixture(scope="module")
def named() -> dict[str, Any]:
    """The names that the page's code defines."""
    lines = re.findall(r"^(?:>>>|\.\.\.) ?(.*)$", PAGE, re.MULTILINE)
    names: dict[str, Any] = {}
    exec("\n".join(line for line in lines if not line.startswith("[")), names)
    return names


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(
    ("name", "loss", "means"),
    [
        ("CPO ", "losses.simpo", False),
        ("CPO-SimPO", "losses.simpo", True),
        ("AlphaPO", "losses.simpo", True),
        ("LD-DPO", "losses.dpo", False),
    ],
)
def test_the_settings_are_those_of_a_run_on_pairs(name: str, loss: str, means: bool) -> None:
    cell = next(line for line in PAGE.splitlines() if line.startswith(f"| {name}")).split("|")[3]
    settings = {k: v for part in re.findall(r"`(.*?)`", cell) for k, v in yaml.safe_load(part).items()}
    config = FitConfig.model_validate({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "d"}} | settings)
    assert config.loss.path.endswith(loss)
    assert (config.kind, config.takes_means) == ("pairs", means)


def test_nash_md(named: dict[str, Any]) -> None:
    """TRL 1.9's: −(P − ½) Σ log π + β Σ (log π − log π_ref) log π, the factor without a gradient."""
    x, ref, win = random(3, 4).requires_grad_(), random(3, 4, seed=1), torch.tensor([0.9, 0.2, 0.5]).double()
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True, True, True, False]])
    scores = win - 0.5
    theirs = (0.1 * (x.detach() - ref) * x * mask).sum(1) - scores * (x * mask).sum(1)
    rewards = torch.zeros(3, 4).double()
    rewards[torch.arange(3), mask.sum(1) - 1] = scores
    data = {"log_probs": x, "ref_log_probs": ref, "response_mask": mask, "group_ids": torch.arange(3)}
    data |= {"scores": scores, "shaped_scores": scores}
    data |= algorithms.estimate_advantages(named["nash_md"], data)
    ours = algorithms.policy_objective(named["nash_md"], data)
    torch.testing.assert_close(gradient(ours, x), gradient(theirs.mean(), x))


def test_xpo(named: dict[str, Any]) -> None:
    """TRL 1.9's: DPO on the pair of a response of the policy and one of the reference, plus α Σ log π of the latter."""
    x, ref = random(4, 3).requires_grad_(), random(4, 3, seed=1)
    mask = torch.tensor([[True] * 3, [True, True, False], [True, False, False], [True] * 3])
    from_reference = torch.tensor([False, True, True, False])
    scores, ids = torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), torch.tensor([0, 0, 1, 1])
    sums, ref_sums = (x * mask).sum(1), (ref * mask).sum(1)
    better, worse = torch.tensor([0, 2]), torch.tensor([1, 3])
    dpo = losses.dpo(sums[better], sums[worse], ref_sums[better], ref_sums[worse], beta=0.1)
    theirs = (dpo + 1e-5 * sums[from_reference]).mean()
    data = {"log_probs": x, "ref_log_probs": ref, "response_mask": mask, "group_ids": ids, "scores": scores}
    data |= {"expert_mask": mask & from_reference[:, None], "shaped_scores": scores}
    data |= algorithms.estimate_advantages(named["xpo"], data)
    ours = algorithms.policy_objective(named["xpo"], data)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient(ours, x), gradient(theirs, x))


def test_minillm(named: dict[str, Any]) -> None:
    """TRL 1.9's at γ = 0: −(log q − log π) log π of the sampled tokens plus KL(π ‖ q) over the vocabulary."""
    logits, teacher = random(2, 3, 5).requires_grad_(), random(2, 3, 5, seed=1).log_softmax(-1)
    mask, ids = torch.tensor([[True] * 3, [True, False, False]]), torch.tensor([[0, 1, 2], [3, 0, 0]])[..., None]
    student = logits.log_softmax(-1)
    x, q = student.gather(-1, ids)[..., 0], teacher.gather(-1, ids)[..., 0]
    kl = (student.exp() * (student - teacher)).sum(-1)
    wanted = torch.autograd.grad(((-(q - x).detach() * x + kl) * mask).sum() / 4, logits, retain_graph=True)[0]
    data = {"log_probs": x, "old_log_probs": x.detach(), "teacher_log_probs": q, "response_mask": mask}
    data |= {"topk_log_probs": student, "teacher_topk_log_probs": teacher, "group_ids": torch.arange(2)}
    data |= {"scores": torch.zeros(2).double(), "shaped_scores": torch.zeros(2).double()}
    data |= algorithms.estimate_advantages(named["minillm"], data)
    ours = algorithms.policy_objective(named["minillm"], data)
    torch.testing.assert_close(gradient(ours, logits), wanted)


def test_planpo(named: dict[str, Any]) -> None:
    """Equations 2, 3, 5 and 6 on two responses that succeed, in 2 turns and in 1, and one that does not."""
    turns = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1]])
    mask = torch.tensor([[True] * 3, [True, False, False], [True] * 3])
    per_turn = torch.tensor([[0.0, 0.0, 5.0], [10.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)  # R / T
    per_token = torch.tensor([[5.0, 0.0, 10.0], [10.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)  # R / L
    got = named["planpo"](per_turn, per_token, torch.zeros(3, dtype=torch.int64), turns, mask, alpha=0.5)
    episode = [0.0, 1.0, -1.0]  # of 5, 10 and 0: a mean of 5, a deviation of 5
    first, second = [0.0, 1.0, -1.0], [math.sqrt(0.5), None, -math.sqrt(0.5)]  # of 5, 10, 0; and of 10, 0
    assert got[0].tolist() == pytest.approx([0.0, 0.0, episode[0] + 0.5 * second[0]], abs=1e-4)
    assert got[1].tolist() == pytest.approx([episode[1] + 0.5 * first[1], 0.0, 0.0], abs=1e-4)
    assert got[2].tolist() == pytest.approx([-1.5, -1 - 0.5 * second[0], -1 - 0.5 * second[0]], abs=1e-4)


def test_dler_and_gfpo_and_draco_are_built(named: dict[str, Any]) -> None:
    data = {"scores": torch.tensor([1.0, 1.0]), "ended": torch.tensor([0, 1]), "response_mask": torch.ones(2, 1).bool()}
    assert algorithms.shape_scores(named["dler"], data)["shaped_scores"].tolist() == [1.0, 0.0]
    assert named["gfpo"].group_size > named["gfpo"].advantage.hyperparameters["keep"]
    assert {"process_rewards", "turn_ids"} <= named["draco"].needs
