"""A name or a shape that is nearly right is answered by the one that is meant."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import trl_trainers
from rlprims import advantage, algorithms, corrections, filters, layout, logprobs, losses, rewards
from rlprims.algorithms import use
from rlprims.cli import main

TOKENS = torch.ones(4, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        (advantage, "GRPO", "grpo"),
        (losses, "ppo_clip", "clipped_surrogate"),
        (losses, "token-mean", "token_mean"),
        (losses, "entropy", "negative_entropy"),
        (filters, "varied_score", "varied_scores"),
        (rewards.verifiers, "GSM8K", "gsm8k"),
        (algorithms, "DAPO", "dapo"),
    ],
)
def test_an_attribute_of_nearly_that_name_is_suggested(module: ModuleType, name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean '{meant}'"):
        getattr(module, name)


def test_a_name_like_no_other_is_only_refused() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        losses.zzz  # noqa: B018


def test_names_of_another_library_are_said() -> None:
    batch = {"token_level_rewards": torch.zeros(2, 2), "index": torch.zeros(2), "response_mask": TOKENS[:2]}
    with pytest.raises(ValueError, match="index is group_ids here; token_level_rewards is rewards here"):
        use(advantage.grpo)(batch)


def test_weights_are_not_a_tensor() -> None:
    weights = corrections.tis(torch.zeros(4, 2), torch.zeros(4, 2), TOKENS)
    for product in (lambda: weights * torch.ones(4, 2), lambda: torch.ones(4, 2) * weights):
        with pytest.raises(TypeError, match=r"multiply the losses by weights\.values"):
            product()


def test_weights_are_not_losses() -> None:
    weights = corrections.tis(torch.zeros(4, 2), torch.zeros(4, 2), TOKENS)
    with pytest.raises(ValueError, match=r"losses is a Weights, .*use its \.values"):
        losses.token_mean(weights, TOKENS)


@pytest.mark.parametrize("given", ["dapo", algorithms.dapo])
@pytest.mark.parametrize(
    "function",
    [
        algorithms.check,
        algorithms.settings,
        lambda given: algorithms.diff(algorithms.grpo(), given),
        trl_trainers.grpo_trainer,
    ],
)
def test_a_preset_must_be_called(function: Callable[[object], object], given: object) -> None:
    with pytest.raises(ValueError, match=r"is no Algorithm: write algorithms\.dapo\(\)"):
        function(given)


def test_a_models_output_is_not_its_logits() -> None:
    class Output:
        logits = torch.zeros(2, 2, 5)

    with pytest.raises(ValueError, match=r"use its \.logits"):
        logprobs.from_logits(Output(), torch.zeros(2, 2, dtype=torch.int64))


def test_a_bound_of_the_ratio_is_asked_about() -> None:
    high = algorithms.grpo().replace(policy_loss={"clip_high": 1.28})
    assert [f.message for f in algorithms.check(high) if "Is 0.28 meant?" in f.message]
    assert not algorithms.check(algorithms.grpo().replace(policy_loss={"clip_high": 0.28}))


class TestAStageOfTheUser:
    @pytest.fixture
    def stage(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """One number per response where there must be one per token, and the same on the tokens."""
        module = ModuleType("mine")
        monkeypatch.setitem(sys.modules, "mine", module)

        def of_responses(rewards, response_mask):
            return rewards.sum(-1)

        def of_tokens(rewards, response_mask):
            return layout.expand_to_tokens(rewards.sum(-1), response_mask)

        for fn in (of_responses, of_tokens):
            fn.__module__, fn.__qualname__ = "mine", fn.__name__
            setattr(module, fn.__name__, fn)
        return module

    def test_its_shape_is_checked_when_it_is_called(self, stage: ModuleType) -> None:
        data = {"shaped_scores": torch.ones(4), "scores": torch.ones(4), "response_mask": TOKENS}
        wrong = algorithms.reinforce().replace(advantage=stage.of_responses)
        message = (
            r"mine\.of_responses returned \(4,\), expected one number per token, \(4, 2\): layout\.expand_to_tokens"
        )
        with pytest.raises(ValueError, match=message):
            algorithms.estimate_advantages(wrong, data)
        right = algorithms.reinforce().replace(advantage=stage.of_tokens)
        assert algorithms.estimate_advantages(right, data)["advantages"].shape == (4, 2)

    def test_and_before_a_run(self, stage: ModuleType) -> None:
        def errors(fn: object) -> list[str]:
            return [f.message for f in algorithms.check(algorithms.reinforce().replace(advantage=fn))]

        assert "mine.of_responses returned (2,), expected one number per token" in errors(stage.of_responses)[0]
        assert errors(stage.of_tokens) == []


CONFIG = """
run_dir: run
algorithm: {preset: grpo, kl_coef: 0.0}
model: {path: ./nowhere}
verifier: rewards.verifiers.gsm8k
data: {train: rows.jsonl}
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train run.yaml verifier=gsm8k", "did you mean rewards.verifiers.gsm8k?"),
        ("train run.yaml algorithm.aggregation=token-mean", "did you mean losses.token_mean?"),
        ("train run.yaml algorithm.preset=dappo", "did you mean 'dapo'?"),
        ("train run.yaml algorithm.clip_hi=0.3", "did you mean policy_loss.clip_high?"),
        ("train run.yaml lr=1e-6", "did you mean optimizer.lr?"),
        ("train run.yaml stepz=5", "did you mean 'steps'?"),
        ("train run.yaml evaluation.best=acc", "no metric 'acc'; sampled/acc, greedy/acc"),
        ("train run.yaml loss=losses.dpo", "loss is a setting of rlprims fit: run rlprims fit run.yaml"),
        ("fit run.yaml", "algorithm is a setting of rlprims train"),
        ("train run.yaml", "model.path: cannot load './nowhere': there is no such folder"),
    ],
)
def test_a_setting_that_is_nearly_right(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}')
    assert main(command.split()) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [("trian run.yaml", "did you mean 'train'?"), ("train run.yaml --steps=5", "a setting has no dashes: steps=5")],
)
def test_a_command_that_is_nearly_right(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "call",
    [
        lambda: losses.clipped_surrogate(*[torch.zeros(4, 2)] * 3, TOKENS, clip_low="0.2"),
        lambda: advantage.grpo(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1]), TOKENS, eps="1e-6"),
        lambda: advantage.gae(torch.zeros(4, 2), torch.zeros(4, 2), TOKENS, gamma="0.9"),
    ],
)
def test_a_text_is_no_number(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"(clip_low='0\.2'|eps='1e-6'|gamma='0\.9') is a text, expected a number"):
        call()
