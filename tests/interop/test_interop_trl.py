"""The adapter for TRL, as far as it goes without TRL; tests/peers trains with the real one."""

import math
import subprocess
import sys
import types

import pytest

from rlprims import algorithms, controllers, corrections, losses
from rlprims.algorithms import KLInReward, use
from rlprims.interop.trl import grpo_trainer, reward_func, rloo_trainer
from rlprims.rewards import verifiers


class Base:
    pass


def test_a_reward_function_reads_the_columns_that_the_verifier_names():
    def named(response, answer, data_source):
        return float(response == answer and data_source == "mine")

    score = reward_func(named, answer="solution")
    assert score.__name__ == "named"
    columns = {"solution": ["1", "1"], "data_source": ["mine", "other"], "trainer_state": object()}
    assert score(prompts=["p"] * 2, completions=["1", "1"], completion_ids=[[1]] * 2, **columns) == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"no column 'solution' .* reward_func\(answer=\)"):
        score(prompts=["p"], completions=["1"], answer=["1"])


def test_a_failure_has_no_score_and_numbers_beside_the_score_are_logged():
    logged = {}
    score = reward_func(verifiers.gsm8k)
    completions = ["#### 7", [{"role": "user", "content": "no"}, {"role": "assistant", "content": "A: 7"}], "7"]
    scores = score(prompts=["p"] * 3, completions=completions, answer=["7", "7", None], log_metric=logged.__setitem__)
    assert scores == [1.0, 1.0, None]
    assert logged == {"gsm8k/acc": 1.0, "gsm8k/format": 1.0}


def test_options_are_the_verifiers():
    score = reward_func(verifiers.gsm8k, strict=True)
    assert score(prompts=["p"], completions=["7"], answer=["7"]) == [0.0]


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (algorithms.ppo(), r"rlprims\.advantage\.gae reads values"),
        (algorithms.remax(), r"rlprims\.advantage\.remax reads baseline_scores"),
        (algorithms.dapo(), r"replace\(filter=None\)"),
        (algorithms.rloo().replace(kl_in_reward=KLInReward()), "kl_in_reward"),
        (algorithms.gspo().replace(aggregation=losses.prompt_token_mean), "prompt_token_mean reads group_ids"),
        (algorithms.echo(), r"loss_terms\.0 is on observation_mask with a mean by itself"),
    ],
    ids=["critic", "greedy", "filter", "kl_in_reward", "groups_in_the_loss", "a_term_with_its_own_mean"],
)
def test_what_trl_does_not_have_is_named(algorithm, why):
    with pytest.raises(ValueError, match=f"TRL's trainer cannot run {algorithm.name}: .*{why}"):
        grpo_trainer(algorithm, Base)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (algorithms.ppo(), r"rlprims\.advantage\.gae reads values"),
        (algorithms.dapo(), r"replace\(filter=None\)"),
        (
            algorithms.rloo().replace(kl_in_reward=KLInReward(controller=use(controllers.AdaptiveKL))),
            r"adapts: take controllers\.FixedKL",
        ),
    ],
    ids=["critic", "filter", "adaptive"],
)
def test_what_trls_rloo_does_not_have_is_named(algorithm, why):
    with pytest.raises(ValueError, match=f"TRL's trainer cannot run {algorithm.name}: .*{why}"):
        rloo_trainer(algorithm, Base)


def test_rloo_may_have_its_kl_in_the_reward():
    algorithm = algorithms.rloo(dialect="trl-1.16").replace(kl_in_reward=KLInReward())
    trainer = rloo_trainer(algorithm, Started)
    assert (trainer.__name__, trainer.algorithm) == ("RLOOTrainer", algorithm)
    with pytest.raises(ValueError, match=r"rloo reads ref_log_probs: give RLOOConfig\(beta=1\.0\)"):
        trainer()
    trainer(beta=0.05)
    with pytest.raises(ValueError, match="dppo reads rollout_log_probs, and this trainer drops those of vLLM"):
        rloo_trainer(algorithms.dppo(), Started)(use_vllm=True)


GROUPED = ("dapo", "dr_grpo", "gdpo", "gpg", "grpo", "maxrl", "opo", "pkpo", "rloo", "w_reinforce")
RATIOS = ("cispo", "dppo", "gspo", "luspo", "sapo", "topr", "vespo")


@pytest.mark.parametrize("preset", GROUPED + RATIOS)
def test_a_preset_without_critic_or_filter_goes(preset):
    algorithm = algorithms.PRESETS[preset]().replace(filter=None)
    trainer = grpo_trainer(algorithm, Base)
    assert issubclass(trainer, Base)
    assert trainer.algorithm == algorithm


class Started:
    """What TRL's own constructor leaves behind."""

    def __init__(self, **settings):
        self.beta, self.aux_loss_enabled = 0.0, False
        self.use_vllm, self.vllm_importance_sampling_correction = False, True
        vars(self).update(settings)


def test_a_configuration_that_does_not_go_with_the_algorithm():
    grpo, gspo, dppo = algorithms.grpo(), algorithms.gspo(), algorithms.dppo()
    with pytest.raises(ValueError, match=r"grpo reads ref_log_probs: give GRPOConfig\(beta=1\.0\)"):
        grpo_trainer(grpo, Started)()
    grpo_trainer(grpo, Started)(beta=0.1)
    with pytest.raises(ValueError, match="gspo has no router_aux_loss_coef"):
        grpo_trainer(gspo, Started)(aux_loss_enabled=True)
    with pytest.raises(ValueError, match=r"gspo corrects nothing: replace\(corrections="):
        grpo_trainer(gspo, Started)(use_vllm=True)
    grpo_trainer(gspo, Started)(use_vllm=True, vllm_importance_sampling_correction=False)
    grpo_trainer(gspo.replace(corrections=(use(corrections.tis),)), Started)(use_vllm=True)
    grpo_trainer(dppo, Started)(use_vllm=True)


def test_trl_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"this trainer needs TRL .*: pip install trl"):
        grpo_trainer(algorithms.gspo())
    monkeypatch.setitem(sys.modules, "trl", types.SimpleNamespace(GRPOTrainer=Base))
    assert issubclass(grpo_trainer(algorithms.gspo()), Base)


def test_the_import_brings_no_trl():
    code = "import sys, rlprims.interop.trl; sys.exit('trl' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_score_is_finite_or_none():
    score = reward_func(lambda response, answer: {"score": float(response), "other": math.nan})
    assert score(prompts=["p"] * 2, completions=["nan", "0.5"], answer=["", ""]) == [None, 0.5]
