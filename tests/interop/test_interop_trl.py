"""The adapter for TRL, as far as it goes without TRL; tests/peers trains with the real one."""

import math
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from examples.trl_trainers import grpo_trainer, reward_func, rloo_trainer
from rlprims import algorithms, controllers, corrections, filters, losses
from rlprims.algorithms import KLInReward, LossTerm, use
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
    with pytest.raises(ValueError, match=r"no column 'solution': .* reward_func\(answer=\)"):
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
        (algorithms.echo(), r"loss_terms\.0 is on observation_mask with a separate mean"),
    ],
    ids=["critic", "greedy", "filter", "kl_in_reward", "groups_in_the_loss", "a_term_with_its_own_mean"],
)
def test_grpo_trainer_names_data_that_trl_does_not_have(algorithm, why):
    with pytest.raises(ValueError, match=f"TRL's trainer cannot run {algorithm.name}: .*{why}"):
        grpo_trainer(algorithm, Base)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (algorithms.ppo(), r"rlprims\.advantage\.gae reads values"),
        (algorithms.dapo(), r"replace\(filter=None\)"),
        (
            algorithms.rloo().replace(kl_in_reward=KLInReward(controller=use(controllers.AdaptiveKL))),
            r"adaptive coefficient: use controllers\.FixedKL",
        ),
    ],
    ids=["critic", "filter", "adaptive"],
)
def test_rloo_trainer_names_data_that_trl_does_not_have(algorithm, why):
    with pytest.raises(ValueError, match=f"TRL's trainer cannot run {algorithm.name}: .*{why}"):
        rloo_trainer(algorithm, Base)


def test_rloo_may_have_its_kl_in_the_reward():
    algorithm = algorithms.rloo(dialect="trl-1.16").replace(kl_in_reward=KLInReward())
    trainer = rloo_trainer(algorithm, Started)
    assert (trainer.__name__, trainer.algorithm) == ("RLOOTrainer", algorithm)
    with pytest.raises(ValueError, match=r"Config\(beta=0\.0\), and rloo has 0\.001: set beta=0\.001, or "):
        trainer()
    trainer(beta=0.001)
    with pytest.raises(ValueError, match="dppo reads rollout_log_probs, which this trainer does not keep for vLLM"):
        rloo_trainer(algorithms.dppo(), Started)(use_vllm=True)


GROUPED = ("dapo", "dr_grpo", "gdpo", "gpg", "grpo", "maxrl", "opo", "pkpo", "rloo", "w_reinforce")
RATIOS = ("cispo", "dppo", "gspo", "luspo", "sapo", "topr", "vespo")


@pytest.mark.parametrize("preset", GROUPED + RATIOS)
def test_a_preset_without_critic_or_filter_goes(preset):
    algorithm = algorithms.PRESETS[preset]().replace(filter=None)
    trainer = grpo_trainer(algorithm, Base)
    assert issubclass(trainer, Base)
    assert trainer.algorithm == algorithm


@dataclass
class GRPOConfig:
    """The names and defaults of TRL 1.16's, as far as the maths reads them; tests/peers compares the two."""

    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    use_vllm: bool = False
    max_completion_length: int | None = 256


class Started:
    """What TRL's own constructor leaves behind."""

    aux_loss_enabled = False

    def __init__(self, aux_loss_enabled=False, **settings):
        self.args = GRPOConfig(**settings)
        self.aux_loss_enabled = aux_loss_enabled
        vars(self).update(vars(self.args))


def test_a_configuration_that_does_not_go_with_the_algorithm():
    gspo, dppo = algorithms.gspo(), algorithms.dppo()
    with pytest.raises(ValueError, match="gspo has no router_aux_loss_coef"):
        grpo_trainer(gspo, Started)(aux_loss_enabled=True)
    with pytest.raises(ValueError, match=r"gspo has no correction for vLLM's samples: use replace\(corrections="):
        grpo_trainer(gspo, Started)(use_vllm=True)
    grpo_trainer(gspo, Started)(use_vllm=True, vllm_importance_sampling_correction=False)
    grpo_trainer(gspo.replace(corrections=(use(corrections.tis),)), Started)(use_vllm=True)
    grpo_trainer(dppo, Started)(use_vllm=True)


DR_GRPO, GRPO = algorithms.dr_grpo(max_length=256), algorithms.grpo(kl_coef=0.0)
SAYS = [
    (algorithms.grpo(), {"beta": 0.04}, {"beta": 0.001}, "grpo has 0.04"),
    (algorithms.grpo(), {"beta": 0.04}, {}, "grpo has 0.04"),
    (GRPO, {}, {"beta": 0.04}, "grpo has 0.0"),
    (algorithms.grpo(dialect="trl-1.16"), {"beta": 0.04}, {"use_bias_correction_kl": False, "beta": 0.04}, "has True"),
    (algorithms.grpo(), {"beta": 0.04, "use_bias_correction_kl": False}, {"beta": 1.0}, "grpo has 0.04"),
    (GRPO, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}, "grpo has 'grpo'"),
    (GRPO, {"epsilon_high": 0.2}, {"epsilon_high": 0.28}, "grpo has 0.2"),
    (GRPO, {}, {"epsilon": 0.1}, "grpo has 0.2"),
    (DAPO := algorithms.dapo().replace(filter=None), {"epsilon_high": 0.28}, {"epsilon": 0.28}, "dapo has 0.2"),
    (DAPO.replace(policy_loss={"clip_low": 0.1}), {"epsilon": 0.1, "epsilon_high": 0.28}, {"epsilon": 0.1}, "has 0.28"),
    (DAPO, {}, {"loss_type": "bnpo"}, "dapo has 'dapo'"),
    (DAPO.replace(policy_loss={"dual_clip": 3.0}), {"delta": 3.0}, {"delta": 4.0}, "dapo has 3.0"),
    (DR_GRPO, {"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 100}, "no such setting"),
    (DR_GRPO, {"scale_rewards": "none"}, {"scale_rewards": "batch"}, "dr_grpo has 'none'"),
    (GRPO.replace(advantage={"std_over": "batch"}), {"scale_rewards": "batch"}, {"scale_rewards": "none"}, "'batch'"),
    (GSPO := algorithms.gspo(), {"importance_sampling_level": "sequence"}, {"loss_type": "luspo"}, "gspo has 'grpo'"),
    (GRPO, {}, {"importance_sampling_level": "sequence"}, "grpo has 'token'"),
    (algorithms.luspo(), {"loss_type": "luspo"}, {"epsilon": 0.3}, "luspo has"),
    (CISPO := algorithms.cispo(), {"loss_type": "cispo", "epsilon_high": 5.0}, {"epsilon_high": 0.2}, "cispo has 5.0"),
    (CISPO, {}, {"delta": 3.0}, "no such setting"),
    (algorithms.sapo(), {"loss_type": "sapo"}, {"sapo_temperature_neg": 1.1}, "sapo has 1.05"),
    (algorithms.vespo(), {"loss_type": "vespo"}, {"vespo_k_pos": 1.0}, "vespo has 2.0"),
    (
        algorithms.gdpo(components=("a",)),
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"scale_rewards": "none"},
        "gdpo has 'group'",
    ),
    (GRPO, {}, {"multi_objective_aggregation": "normalize_then_sum"}, "grpo has 'sum_then_normalize'"),
    (
        GRPO.replace(token_selection=use(filters.high_entropy, fraction=0.2)),
        {"top_entropy_quantile": 0.2},
        {"top_entropy_quantile": 0.5},
        "grpo has 0.2",
    ),
    (
        GRPO.replace(corrections=(use(corrections.opsm, delta=0.5),)),
        {"off_policy_mask_threshold": 0.5},
        {"off_policy_mask_threshold": 0.4},
        "grpo has 0.5",
    ),
    (
        GRPO.replace(loss_terms=(LossTerm(coefficient=0.01, loss=use(losses.negative_entropy)),)),
        {"entropy_coef": 0.01},
        {"entropy_coef": 0.1},
        "grpo has 0.01",
    ),
    (GRPO, {}, {"use_adaptive_entropy": True}, "no such setting"),
    (
        GRPO.replace(corrections=(use(corrections.tis),)),
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
        {"use_vllm": True, "vllm_importance_sampling_clip_max": 4.0},
        "grpo has 2.0",
    ),
    (
        GRPO.replace(corrections=(use(corrections.tis),)),
        {"vllm_importance_sampling_mode": "sequence_truncate"},  # without vLLM nobody reads it
        {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
        "grpo has 'token_truncate'",
    ),
]


@pytest.mark.parametrize(("algorithm", "agrees", "contradicts", "why"), SAYS)
def test_no_setting_is_ignored(algorithm, agrees, contradicts, why):
    """TRL's beta=0.001 once trained at the algorithm's 0.04: now it says the same, or nothing is trained."""
    grpo_trainer(algorithm, Started)(**agrees)
    with pytest.raises(ValueError, match=f"contradict the algorithm(.|\n)*{why}.*, or "):
        grpo_trainer(algorithm, Started)(**contradicts)


def test_every_contradiction_is_named_with_what_to_write():
    with pytest.raises(ValueError, match="contradict the algorithm") as caught:
        grpo_trainer(algorithms.grpo(), Started)(beta=0.001, epsilon=0.1)
    assert str(caught.value).splitlines()[1:] == [
        "GRPOConfig(beta=0.001), and grpo has 0.04: set beta=0.04, or give its KL that coefficient, as "
        "algorithms.grpo(kl_coef=0.001) does",
        "GRPOConfig(epsilon=0.1), and grpo has 0.2: leave epsilon out of GRPOConfig, or "
        "replace(policy_loss={'clip_low': 0.1, 'clip_high': 0.1})",
    ]
    grpo_trainer(algorithms.grpo(kl_coef=0.001).replace(policy_loss={"clip_low": 0.1, "clip_high": 0.1}), Started)(
        beta=0.001, epsilon=0.1
    )


def test_trl_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="trl"):
        grpo_trainer(algorithms.gspo())
    monkeypatch.setitem(sys.modules, "trl", types.SimpleNamespace(GRPOTrainer=Base))
    assert issubclass(grpo_trainer(algorithms.gspo()), Base)


@pytest.mark.slow
def test_the_import_brings_no_trl():
    code = "import sys, examples.trl_trainers; sys.exit('trl' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_score_is_finite_or_none():
    score = reward_func(lambda response, answer: {"score": float(response), "other": math.nan})
    assert score(prompts=["p"] * 2, completions=["nan", "0.5"], answer=["", ""]) == [None, 0.5]
