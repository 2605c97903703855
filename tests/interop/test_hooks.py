"""The code that docs/interop.md has for other libraries' hooks, on what each hook is given; the numbers by hand."""

import enum
import math
import re
import sys
import types
from dataclasses import dataclass
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
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(PAGE.parents[1] / "examples")  # as PYTHONPATH has it
        exec(dict(OTHERS)[library], namespace)
    return namespace


def test_every_library_of_the_page_has_a_test():
    others = ["prime-rl", "SkyRL", "NeMo-RL", "slime", "torchtitan", "tinker", "ms-swift", "Liger"]
    assert [name for name, _ in OTHERS] == ["OpenRLHF", *others]


def test_openrlhf():
    """One query at a time: the text of prompt and response, special tokens and all."""
    score = given("OpenRLHF")["reward_func"]
    found = score([r"1+1=So it is $\boxed{2}$<|im_end|>"], ["1+1="], ["2"])
    assert [found["rewards"].tolist(), found["scores"].tolist()] == [[1.0], [1.0]]
    assert score([r"1+1=$\boxed{3}$"], ["1+1="], ["2"])["rewards"].tolist() == [0.0]


def test_prime_rl():
    """The object that ``import_path`` names; test_other_trainers.py calls it, and those of the other three."""
    assert type(given("prime-rl")["loss"]).__name__ == "PrimeRL"


def test_skyrl(monkeypatch):
    registered: dict[str, Any] = {}

    class PolicyLossRegistry:
        register = registered.__setitem__

    def register(name):
        return lambda fn: registered.setdefault(name, fn)

    names = {"PolicyLossRegistry": PolicyLossRegistry, "register_advantage_estimator": register}
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
    config = types.SimpleNamespace(loss_reduction="token_mean", off_policy_correction=types.SimpleNamespace())
    loss, metrics = registered["rlprims"](new, torch.zeros(3, 2), a, config, loss_mask=mask, rollout_logprobs=None)
    torch.testing.assert_close(loss, torch.tensor(-2.0 * math.log(2.0)))
    assert metrics == {}


def test_slime():
    block = given("slime")
    assert type(block["loss"]).__name__ == "Slime"
    advantages = block["advantages"]
    data = {"rewards": [1.0, -0.5], "loss_masks": [torch.ones(3), torch.tensor([1, 0, 1, 0])], "kl": None}
    assert advantages(types.SimpleNamespace(gamma=0.5), data) is None
    assert [a.tolist() for a in data["advantages"]] == [[0.25, 0.5, 1.0], [-0.25, 0.0, -0.5, 0.0]]
    assert data["returns"] is data["advantages"]


def test_nemo_rl(monkeypatch):
    level = enum.Enum("LossType", {"TOKEN_LEVEL": "token_level"})
    kind = enum.Enum("LossInputType", {"LOGPROB": "logprob"})
    names = {"LossType": level, "LossInputType": kind}
    loss = given("NeMo-RL", monkeypatch, nemo_rl__algorithms__loss__interfaces=names)["loss_fn"]
    assert (loss.loss_type, loss.input_type) == (level.TOKEN_LEVEL, kind.LOGPROB)


def test_torchtitan(monkeypatch):
    """In chunks and micro-batches as in PolicyTrainer; the third token has no log-prob of the sampler."""

    class BaseLoss:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    def compute_logprobs(logits, labels):
        return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    names = {"BaseLoss": BaseLoss, "compute_logprobs": compute_logprobs}
    made = given("torchtitan", monkeypatch, torchtitan__components__loss=names)["CISPO"]
    check_torchtitan(made(config=made.Config(w_max=1.5)), lambda x: x)


def check_torchtitan(loss: Any, placed: Any) -> None:
    logits = torch.tensor([[1.0, 1.0, 2.0], [2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 6.0]]).log().requires_grad_()
    labels, mask = torch.tensor([2, 0, 1, 2]), torch.tensor([True, True, True, False])
    sampler = torch.tensor([0.5, 0.25, math.nan, 0.5]).log()  # ratios 1 and 2, clipped to 1.5
    advantages = torch.tensor([1.0, -1.0, 1.0, 9.0])

    def of(part: slice) -> torch.Tensor:
        data = {"generator_logprobs": sampler, "advantages": advantages, "loss_mask": mask}
        return loss(placed(logits[part]), placed(labels[part]), 2, **{k: placed(x[part]) for k, x in data.items()})[0]

    whole, parts = of(slice(0, 4)), [of(slice(0, 1)), of(slice(1, 4))]
    torch.testing.assert_close(whole.detach(), torch.tensor((-1.0 + 1.5) * math.log(0.5) / 2))
    torch.testing.assert_close(sum(parts), whole)
    whole.backward()
    assert logits.grad[2:].abs().sum() == 0


def test_tinker():
    @dataclass
    class Tensors:
        x: torch.Tensor

        def to_torch(self) -> torch.Tensor:
            return self.x

    check_tinker(given("tinker")["loss"], lambda **inputs: types.SimpleNamespace(loss_fn_inputs=inputs), Tensors)


def check_tinker(loss: Any, datum: Any, tensor: Any) -> None:
    sampler = [torch.tensor([0.9, 0.5, 0.25]).log(), torch.tensor([0.9, 0.5]).log()]
    advantages, masks = [torch.tensor([9.0, 1.0, -1.0]), torch.tensor([9.0, 2.0])], [[0.0, 1.0, 1.0], [0.0, 1.0]]
    data = [
        datum(target_tokens=tensor(torch.arange(len(q))), logprobs=tensor(q), advantages=tensor(a), mask=tensor(m))
        for q, a, m in zip(sampler, advantages, map(torch.tensor, masks), strict=True)
    ]
    new = [torch.tensor([0.9, 0.5, 0.5]).log().requires_grad_(), torch.tensor([0.9, 0.5]).log().requires_grad_()]
    total, metrics = loss(data, new)  # ratios 1, 2 and 1; three tokens
    total.backward()
    torch.testing.assert_close(new[0].grad, torch.tensor([0.0, -1.0, 2.0]) / 3)
    torch.testing.assert_close(new[1].grad, torch.tensor([0.0, -2.0]) / 3)
    assert metrics["loss"] == pytest.approx((-1 + 2 - 2) * math.log(0.5) / 3)


def test_ms_swift(monkeypatch):
    """swift calls ``orms[name](args=...)`` once, then with the completions and the dataset's columns; None is NaN."""
    pytest.importorskip("math_verify")

    class ORM:
        def __init__(self, args=None, **kwargs):
            self.args = args

    orms: dict[str, Any] = {}
    given("ms-swift", monkeypatch, swift__rewards={"ORM": ORM, "orms": orms})
    score = orms["rlprims_math"](args=types.SimpleNamespace())
    completions = [r"So $\boxed{2}$", r"So $\boxed{3}$"]
    assert score(completions, trainer_state=None, solution=["2", "2"], messages=[[], []]) == [1.0, 0.0]


def test_liger(monkeypatch):
    """A chunk of one row of a micro-batch, of which two are the step; tests/peers has the real one."""

    class LigerFusedLinearGRPOFunction:
        @staticmethod
        def _compute_dapo_normalizer(attention_mask, num_items_in_batch=None):
            return attention_mask.sum() if num_items_in_batch is None else torch.tensor(num_items_in_batch)

    module = types.SimpleNamespace(LigerFusedLinearGRPOFunction=LigerFusedLinearGRPOFunction)
    loss = given("Liger", monkeypatch, liger_kernel__chunked_loss={"grpo_loss": module})["CISPO"]
    assert module.LigerFusedLinearGRPOFunction is loss
    new, old = torch.tensor([[0.6, 0.5, 0.9]]).log(), torch.tensor([[0.1, 0.25, math.nan]]).log()
    mask, whole = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    chunk = {"attention_mask": mask, "advantages": torch.tensor([-1.0]), "full_attention_mask": whole}
    total, (clipped,) = loss.ppo_loss_fn(new, old_per_token_logps=old, num_items_in_batch=8, loss_type="dapo", **chunk)
    torch.testing.assert_close(total, torch.tensor((5 * math.log(0.6) + 2 * math.log(0.5)) / 8))  # 6 is clipped to 5
    assert clipped == 1 / 8
    torch.testing.assert_close(loss.ppo_loss_fn(new, **chunk)[0], torch.tensor(math.log(0.6) + math.log(0.5)) / 5)
    for setting in ({"beta": 0.1}, {"vllm_is_ratio": torch.ones(1, 3)}):
        with pytest.raises(ValueError, match="set beta=0 and no vllm_is_ratio"):
            loss.ppo_loss_fn(new, **chunk, **setting)
