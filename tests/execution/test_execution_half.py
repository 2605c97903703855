"""``model.dtype: bfloat16``: computed in bfloat16, trained in float32."""

import pytest
import torch
from torch import nn

from rlprims import algorithms
from rlprims.execution import OptimizerConfig
from rlprims.execution.hf._train_state import TrainState
from tests.execution.execution_contract import identical, local, saved, training_batch

GRPO = algorithms.grpo()
SMALL = OptimizerConfig(lr=1e-5, weight_decay=0.0)


def test_steps_add_up_that_bfloat16_cannot_represent():
    """From 1 to 0.98 by 200 steps of 1e-4, where the next bfloat16 number below 1 is 0.996."""
    module = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    state = TrainState(module, OptimizerConfig(lr=1e-4, weight_decay=0.0), updates=200)
    for _ in range(200):
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        state.step()
    assert state.masters[0].item() == pytest.approx(0.98, abs=1e-4)
    assert module.weight.item() == pytest.approx(0.98, abs=2**-8)
    assert module.weight.dtype is torch.bfloat16


def test_gradients_of_micro_batches_are_summed_in_float32():
    module = nn.Linear(1, 1, bias=False).bfloat16()
    state = TrainState(module, OptimizerConfig(), updates=1)
    for x in (1.0, *[2.0**-10] * 8):  # each is lost beside 1 in bfloat16
        module(torch.full((1, 1), x, dtype=torch.bfloat16)).sum().backward()
    assert float(state.masters[0].grad) == 1 + 2**-7
    assert module.weight.grad is None


@pytest.mark.parametrize("fused", [True, False])
def test_small_steps_are_those_of_float32(model_path, fused):
    """Three updates at 1e-5: the same direction for nearly every weight, and a policy that has moved by as much."""
    batch, moved = training_batch(local(model_path, GRPO)), {}
    for dtype in ("float32", "bfloat16"):
        execution = local(model_path, GRPO, optimizer=SMALL, dtype=dtype, fused_head=fused)
        state = execution.training.policy
        before = [master.detach().clone() for master in state.masters]
        for _ in range(3):
            execution.update(batch, GRPO)
        moved[dtype] = torch.cat(
            [(now.detach() - old).flatten() for now, old in zip(state.masters, before, strict=True)]
        )
    inside = moved["float32"].abs() > 2e-5  # where all three steps agree
    assert inside.float().mean() > 0.5
    agree = moved["float32"].sign() == moved["bfloat16"].sign()
    assert agree[inside].float().mean() > 0.9
    assert float(moved["bfloat16"][inside].abs().median()) == pytest.approx(3e-5, rel=0.1)


def test_a_checkpoint_has_the_float32_weights(model_path, tmp_path):
    through = local(model_path, GRPO, optimizer=SMALL, dtype="bfloat16")
    batch = training_batch(through)
    through.update(batch, GRPO)
    (tmp_path / "saved").mkdir()
    through.save(tmp_path / "saved")()
    resumed = local(model_path, GRPO, optimizer=SMALL, dtype="bfloat16")
    resumed.load(tmp_path / "saved")
    for execution, name in ((through, "through"), (resumed, "resumed")):
        execution.update(batch, GRPO)
        (tmp_path / name).mkdir()
        execution.save(tmp_path / name)
    masters = [execution.training.policy.masters for execution in (through, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))
    assert identical(saved(tmp_path / "through"), saved(tmp_path / "resumed"))
    assert all(x.dtype is torch.bfloat16 for x in saved(tmp_path / "through").values())
