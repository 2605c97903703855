"""The experiences that OpenRLHF 0.11.2 makes, read by the hook: ``audit`` names its estimator."""

import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401  # it asks which packages are installed


class Absent(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


# What its models and launchers import wants a GPU; the experience maker's arithmetic does not use it.
ABSENT = ("deepspeed", "flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
OWN = ("openrlhf.models.actor", "openrlhf.models.model", "openrlhf.trainer.ray.launcher")
for name in (*ABSENT, *OWN):
    sys.modules[name] = Absent(name)
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402

for name in (*ABSENT, *OWN):  # others ask whether these are installed
    del sys.modules[name]

from examples.audit_hooks import openrlhf  # noqa: E402
from rlprims import audit  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SAMPLES = 4
NAMES = {
    "rloo": "advantage.rloo",
    "dr_grpo": "advantage.gpg",  # the score minus the group's mean
    "group_norm": "advantage.grpo",  # its eps of 1e-9 is among those that this batch cannot tell apart
    "reinforce_baseline": "advantage.reinforce_pp_baseline(ddof=0)",
}


def rollouts() -> list[Experience]:
    """Sixteen samples, each with a prompt of three tokens, as the samples generator makes them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(16):
        length = int(torch.randint(1, 6, (1,), generator=generator))
        mask = torch.zeros(1, 2 + length, dtype=torch.long)  # of all tokens but the first
        mask[:, 2:] = 1
        score = torch.tensor([float(number % SAMPLES >= 1 + number // SAMPLES % 2)])
        log_probs = -torch.rand(1, 2 + length, generator=generator)
        found.append(
            Experience(
                sequences=torch.randint(3, 50, (1, 3 + length), generator=generator),
                attention_mask=torch.ones(1, 3 + length, dtype=torch.long),
                action_mask=mask,
                action_log_probs=log_probs,
                rollout_log_probs=log_probs + 1e-4 * torch.randn(log_probs.shape, generator=generator),
                kl=torch.zeros(1, 2 + length),
                rewards=score,
                scores=score,
                response_length=torch.tensor([float(length)]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([3.0 + length]),
                info={},
            )
        )
    return found


def settings(estimator: str) -> types.SimpleNamespace:
    named = types.SimpleNamespace
    advantage = named(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    reward = named(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None)
    reward.overlong_penalty_factor = 1.0
    rollout = named(n_samples_per_prompt=SAMPLES, micro_batch_size=3, max_new_tokens=8)
    return named(
        algo=named(advantage=advantage), reward=reward, rollout=rollout, train=named(dynamic_batch_enable=False)
    )


def experiences(estimator: str) -> list[Experience]:
    args = settings(estimator)
    strategy, tokenizer = types.SimpleNamespace(args=args), types.SimpleNamespace(pad_token_id=0)
    maker = RemoteExperienceMaker(None, None, None, None, types.SimpleNamespace(value=0.0), strategy, tokenizer)
    return maker.compute_advantages_and_returns(maker.split_rollout_samples(rollouts()))


@pytest.mark.parametrize("estimator", NAMES)
def test_the_estimator_is_named_and_no_check_finds_an_error(estimator: str, capsys: pytest.CaptureFixture) -> None:
    columns = openrlhf(experiences(estimator), SAMPLES)
    assert f"advantages: {NAMES[estimator]}" in capsys.readouterr().out
    assert columns["response_mask"].shape == columns["responses"].shape == columns["attention_mask"].shape
    assert columns["group_ids"].bincount().tolist() == [SAMPLES] * 4
    assert not audit.report(columns, tolerance=1e-4).errors


def test_a_group_that_is_not_the_prompts_is_no_formula() -> None:
    """Three samples of a prompt where there are four: nothing fits, so the columns say which rows are a group."""
    columns = openrlhf(experiences("dr_grpo"), 3)
    assert not audit.identify(columns, tolerance=1e-4)["advantages"].parts
