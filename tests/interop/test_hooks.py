"""The code that docs/interop.md has for other libraries' hooks, on what each hook is given; the numbers by hand."""

import enum
import math
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
OTHERS = re.findall(
    r"^\*\*([\w-]+)\*\*.*?```python\n(.*?)```",
    PAGE.read_text(encoding="utf-8").split("## Other libraries")[1],
    re.M | re.S,
)


def given(library: str, monkeypatch: pytest.MonkeyPatch | None = None, **modules: dict[str, Any]) -> dict[str, Any]:
    """The names that the block of a library defines; ``modules`` has what it imports of that library."""
    for name, members in modules.items():
        parts = name.split("__")
        for i in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:i]))
            vars(module).update(members if i == len(parts) else {"__path__": []})
            monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace: dict[str, Any] = {}
    exec(dict(OTHERS)[library], namespace)
    return namespace


def test_every_library_of_the_page_has_a_test():
    assert [name for name, _ in OTHERS] == ["OpenRLHF", "prime-rl", "SkyRL", "slime", "NeMo-RL"]


def test_openrlhf():
    """One query at a time: the text of prompt and response, special tokens and all."""
    score = given("OpenRLHF")["reward_func"]
    found = score([r"1+1=So it is $\boxed{2}$<|im_end|>"], ["1+1="], ["2"])
    assert [found["rewards"].tolist(), found["scores"].tolist()] == [[1.0], [1.0]]
    assert score([r"1+1=$\boxed{3}$"], ["1+1="], ["2"])["rewards"].tolist() == [0.0]


def test_prime_rl(monkeypatch):
    @dataclass
    class LossOutputs:
        loss: torch.Tensor
        metrics: dict[str, torch.Tensor]

    @dataclass
    class LossInputs:
        trainer_logprobs: torch.Tensor
        inference_logprobs: torch.Tensor
        advantages: torch.Tensor
        loss_mask: torch.Tensor
        ref_logprobs: torch.Tensor | None = field(default=None)

    loss = given("prime-rl", monkeypatch, prime_rl__trainer__rl__loss={"LossOutputs": LossOutputs})["loss"]
    p, q = torch.tensor([0.50, 0.20, 0.60]), torch.tensor([0.40, 0.20, 0.20])
    x = LossInputs(p.log().requires_grad_(), q.log(), torch.tensor([1.0, -2.0, 1.0]), torch.tensor([True, True, True]))
    out = loss(x)  # ratios 1.25 and 1; the third has moved by 0.4 in probability, further than 0.15
    out.loss.backward()
    torch.testing.assert_close(x.trainer_logprobs.grad, torch.tensor([-1.25, 2.0, 0.0]))
    wide = loss(x, threshold_high=0.5).loss
    torch.testing.assert_close(wide.detach(), torch.tensor(-1.25 + 2.0 - 3.0))


def test_skyrl(monkeypatch):
    registered: dict[str, Any] = {}

    def register(name):
        return lambda fn: registered.setdefault(name, fn)

    names = {"register_advantage_estimator": register, "register_policy_loss": register}
    given("SkyRL", monkeypatch, skyrl__backends__skyrl_train__utils__ppo_utils=names)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 9.0], [0.0, 1.0]])
    index = np.array(["b", "b", "a"], dtype=object)
    config = {"values": None, "grpo_norm_by_std": True, "gamma": 1.0, "lambd": 1.0, "config": None}
    a, returns = registered["rlprims_maxrl"](
        token_level_rewards=rewards, response_mask=mask, index=index, **config
    )  # of b the mean is 0.5: (1 - 0.5) / 0.5 and (0 - 0.5) / 0.5
    torch.testing.assert_close(a, torch.tensor([[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]))
    assert returns is a
    new = torch.tensor([[math.log(2.0), 0.0], [0.0, 7.0], [0.0, 0.0]])
    loss, metrics = registered["rlprims_cispo"](new, torch.zeros(3, 2), a, None, loss_mask=mask, rollout_logprobs=None)
    torch.testing.assert_close(loss, torch.tensor(-2.0 * math.log(2.0)))
    assert metrics == {}


def test_slime():
    advantages = given("slime")["advantages"]
    data = {"rewards": [1.0, -0.5], "loss_masks": [torch.ones(3), torch.tensor([1, 0, 1, 0])], "kl": None}
    assert advantages(types.SimpleNamespace(gamma=0.5), data) is None
    assert [a.tolist() for a in data["advantages"]] == [[0.25, 0.5, 1.0], [-0.25, 0.0, -0.5, 0.0]]
    assert data["returns"] is data["advantages"]


def test_nemo_rl(monkeypatch):
    level = enum.Enum("LossType", {"TOKEN_LEVEL": "token_level"})
    kind = enum.Enum("LossInputType", {"LOGPROB": "logprob"})
    names = {"LossType": level, "LossInputType": kind}
    loss = given("NeMo-RL", monkeypatch, nemo_rl__algorithms__loss__interfaces=names)["Loss"]()
    assert (loss.loss_type, loss.input_type) == (level.TOKEN_LEVEL, kind.LOGPROB)
    data = {
        "token_mask": torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "prev_logprobs": torch.zeros(3, 3),
        "advantages": torch.tensor([[9.0, 1.0, 1.0], [9.0, -1.0, 9.0], [9.0, 9.0, 9.0]]),
    }
    new = torch.tensor([1.5, 1.0, 0.5, 1.0, 1.0, 1.0]).log().view(3, 2)
    total, metrics = loss(
        data, global_valid_seqs=torch.tensor(4), global_valid_toks=torch.tensor(8), next_token_logprobs=new
    )  # 1.5 is clipped to 1.2, 0.5 to 0.8; eight tokens on all ranks
    torch.testing.assert_close(total, torch.tensor((-1.2 - 1.0 + 0.8) / 8))
    assert metrics["num_valid_samples"] == 2.0
