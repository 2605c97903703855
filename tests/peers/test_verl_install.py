"""verl 0.9 runs our estimators and losses through its registries; where it has the same, so are the numbers."""

import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from rlprims import advantage, algorithms, losses
from rlprims.algorithms import use
from rlprims.grouping import dense_ids
from rlprims.interop.verl import install
from rlprims.masking import zero_outside
from rlprims.types import Totals

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the warnings of verl, Ray and tensordict

# The trainer's module wants the servers' packages, cachetools and uvicorn; what is called here does not.
sys.modules.setdefault("verl.workers.rollout.llm_server", types.SimpleNamespace(LLMServerManager=None))
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402

INSTALLED = install()
UIDS = np.array(["b", "a", "b", "c", "a", "c", "b", "c"], dtype=object)
B, T, PROMPT = len(UIDS), 6, 3


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Responses of 1 to T tokens, one of them with a hole (a tool's answer); rewards on the last one."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 1, 4, 3, 6, 2, 5, 4])
    mask = torch.arange(T) < lengths[:, None]
    mask[0, 2] = False
    rewards = torch.zeros(B, T).scatter(1, lengths[:, None] - 1, torch.rand(B, 1, generator=generator))
    old = -2 * torch.rand(B, T, generator=generator)
    return {
        "response_mask": mask,
        "rewards": rewards,
        "values": torch.randn(B, T, generator=generator),
        "baseline_scores": torch.rand(B, generator=generator),
        "old_log_probs": old,
        "log_probs": (old + 0.4 * torch.randn(B, T, generator=generator)).clamp(max=-0.01),
        "advantages": zero_outside(torch.randn(B, T, generator=generator), mask),
        "rollout_is_weights": 0.5 + torch.rand(B, T, generator=generator),
        "group_ids": dense_ids(UIDS),
        "lengths": lengths,
    }


def by_verl(estimator: str, **config) -> torch.Tensor:
    """What verl's trainer gets from an estimator."""
    data = batch()
    tensors = {
        "token_level_rewards": data["rewards"],
        "response_mask": data["response_mask"].long(),
        "values": data["values"],
        "reward_baselines": data["baseline_scores"],
    }
    settings = AlgoConfig(adv_estimator=estimator, **config)
    done = compute_advantage(
        DataProto.from_dict(tensors, non_tensors={"uid": UIDS}),
        adv_estimator=estimator,
        gamma=settings.gamma,
        lam=settings.lam,
        norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo,
        config=settings,
    )
    return zero_outside(done.batch["advantages"], data["response_mask"])


CONFIGS = [{}, {"gamma": 0.9, "norm_adv_by_std_in_grpo": False}]


@pytest.mark.parametrize("config", CONFIGS, ids=["defaults", "changed"])
@pytest.mark.parametrize("name", INSTALLED.estimators)
def test_an_estimator_through_verl_is_ours_called_directly(name, config):
    settings = AlgoConfig(**config)
    hyperparameters = {"gamma": settings.gamma, "normalize_std": settings.norm_adv_by_std_in_grpo}
    part = use(getattr(advantage, name.removeprefix("rlprims/")))
    own = part(batch(), **{k: v for k, v in hyperparameters.items() if k in part.hyperparameters})
    assert torch.equal(by_verl(name, **config), own)
    assert own.abs().sum() > 0


SAME_ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "opo": "opo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_passk": "pass_at_k_training",
    "gpg": "gpg",
}


@pytest.mark.parametrize("config", CONFIGS, ids=["defaults", "changed"])
@pytest.mark.parametrize(("theirs", "ours"), SAME_ESTIMATORS.items())
def test_verls_own_estimators_give_the_same(theirs, ours, config):
    torch.testing.assert_close(by_verl(f"rlprims/{ours}", **config), by_verl(theirs, **config), rtol=1e-5, atol=1e-6)


def test_verls_gae_is_ours_whitened():
    data = batch()
    own = advantage.gae(data["rewards"], data["values"], data["response_mask"], gamma=0.9, lam=0.8)
    whitened = advantage.whiten(own, data["response_mask"])
    torch.testing.assert_close(whitened, by_verl("gae", gamma=0.9, lam=0.8), rtol=1e-5, atol=1e-6)


def actor(loss_mode: str, **changes) -> ActorConfig:
    settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 8, "clip_ratio_high": 0.28}
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode), **settings | changes)


def step(loss_mode: str, rows: slice = slice(None), *, weighted: bool = True, **changes):
    """verl's actor on some rows of a batch: the loss, its gradient by log-prob, what it logs."""
    data = batch()
    log_probs = data["log_probs"].clone().requires_grad_()
    responses = torch.arange(T) < data["lengths"][:, None]
    attention = torch.cat([torch.ones(B, PROMPT, dtype=torch.bool), responses], 1)[rows]
    # The model's outputs without padding: of each sequence, a log-prob of the token that follows.
    full = torch.cat([torch.zeros(B, PROMPT - 1), log_probs, torch.zeros(B, 1)], 1)[rows]
    unpadded = [row[: int(seen.sum())] for row, seen in zip(full, attention, strict=True)]
    fields = {name: data[name][rows] for name in ("response_mask", "old_log_probs", "advantages")}
    if weighted:
        fields["rollout_is_weights"] = data["rollout_is_weights"][rows]
    prompts, answers = torch.ones(B, PROMPT).long()[rows], torch.ones(B, T).long()[rows]
    inputs = TensorDict(
        {"prompts": prompts, "responses": answers, "attention_mask": attention, **fields}, batch_size=len(prompts)
    )
    counts = {"dp_size": 2, "batch_num_tokens": int(data["response_mask"].sum()), "global_batch_size": B}
    for name, count in counts.items():
        tensordict_utils.assign_non_tensor_data(inputs, name, count)
    loss, metrics = ppo_loss(actor(loss_mode, **changes), {"log_probs": torch.cat(unpadded)}, inputs)
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


MODES = {
    "token-mean": use(losses.token_mean),
    "token-sum": use(losses.token_sum),
    "seq-mean-token-sum": use(losses.seq_mean_token_sum),
    "seq-mean-token-mean": use(losses.seq_mean_token_mean),
    "seq-mean-token-sum-norm": use(losses.seq_mean_token_sum_norm, length=T),
}
ACTORS_SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INSTALLED.policy_losses)
def test_a_loss_through_verl_is_ours_called_directly(name, mode):
    data = batch()
    data["log_probs"].requires_grad_()
    data["rollout_log_probs"] = data["old_log_probs"]
    part = use(getattr(losses, name.removeprefix("rlprims/")))
    per_token = part(data, **{k: v for k, v in ACTORS_SETTINGS.items() if k in part.hyperparameters})
    own = 2 * MODES[mode]({**data, "losses": per_token * data["rollout_is_weights"]})
    own.backward()
    loss, gradient, metrics = step(name, loss_agg_mode=mode)
    torch.testing.assert_close(loss, own.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, data["log_probs"].grad, rtol=1e-6, atol=1e-7)
    assert metrics["actor/ratio_max"].aggregate() > 1


SAME_LOSSES = [
    *(("vanilla", "clipped_surrogate", mode) for mode in MODES),
    *(("gpg", "reinforce", mode) for mode in MODES),
    # These two aggregate so whatever loss_agg_mode says. verl's gspo is the form for advantages that differ by token.
    ("gspo", "gspo_token", "seq-mean-token-mean"),
    ("sapo", "sapo", "seq-mean-token-mean"),
]


@pytest.mark.parametrize(("theirs", "ours", "mode"), SAME_LOSSES)
def test_verls_own_losses_give_the_same(theirs, ours, mode):
    for a, b in zip(step(f"rlprims/{ours}", loss_agg_mode=mode)[:2], step(theirs, loss_agg_mode=mode)[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up(mode):
    settings = {"loss_agg_mode": mode, "loss_scale_factor": T}
    whole = step("rlprims/clipped_surrogate", **settings)
    parts = [step("rlprims/clipped_surrogate", rows, **settings) for rows in (slice(3), slice(3, None))]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    torch.testing.assert_close(sum(part[1] for part in parts), whole[1])


def test_an_algorithm_brings_its_hyperparameters_and_aggregation():
    cispo = algorithms.cispo(dialect="verl-0.9")
    names = install(cispo).policy_losses
    assert "rlprims/algorithms/cispo" in names
    changes = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    for a, b in zip(step("rlprims/algorithms/cispo")[:2], step("cispo", **changes)[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    data = batch()
    data["log_probs"].requires_grad_()
    totals = Totals(tokens=data["response_mask"].sum(), sequences=B, groups=0)
    own = 2 * losses.token_mean(cispo.policy_loss(data), data["response_mask"], totals=totals)
    loss, _, _ = step("rlprims/algorithms/cispo", weighted=False, loss_agg_mode="seq-mean-token-sum")
    torch.testing.assert_close(loss, own.detach())

    # The same name once more, changed: the later one counts.
    install(cispo.replace(advantage=use(advantage.pkpo, k=2)))
    assert torch.equal(by_verl("rlprims/algorithms/cispo"), use(advantage.pkpo, k=2)(batch()))


def test_the_alone_keep_their_score_in_verls_dialect():
    install(algorithms.grpo(kl_coef=0.0, dialect="verl-0.9"))
    rewards, mask = torch.tensor([[0.0, 0.5], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    calls = {
        name: core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=mask, index=np.array(["a", "b"]), config=AlgoConfig()
        )[0]
        for name in ("grpo", "rlprims/grpo", "rlprims/algorithms/grpo")
    }
    torch.testing.assert_close(calls["rlprims/algorithms/grpo"], calls["grpo"])
    assert not calls["rlprims/grpo"].any()


def test_install_names_primitives_whose_data_verl_does_not_have():
    assert INSTALLED.left_out.keys() >= {"gae", "gdpo", "optimal_token_baseline", "vtrace", "pkpo", "decoupled_ppo"}
    assert INSTALLED.left_out["td_lambda"] == "verl does not pass values"
    with pytest.raises(ValueError, match=r"ppo needs: rlprims.advantage.gae reads values"):
        install(algorithms.ppo())
    with pytest.raises(ValueError, match=r"loss_terms: set actor\.use_kl_loss"):
        install(algorithms.grpo())
    estimate = core_algos.get_adv_estimator_fn("rlprims/grpo")
    with pytest.raises(ValueError, match=r"\['group_ids'\]"):
        estimate(token_level_rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2))
    loss = core_algos.get_policy_loss_fn("rlprims/cispo")
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'"):
        loss(*[torch.zeros(1, 1)] * 3, torch.ones(1, 1), "mean", actor("rlprims/cispo"))


@pytest.mark.parametrize(
    "environment",
    [{}, {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "rlprims.interop.verl.plugin"}],
    ids=["entry point", "variable"],
)
def test_every_process_registers(environment):
    code = "import verl; from verl.trainer.ppo import core_algos as c; c.get_policy_loss_fn('rlprims/gppo')"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", **environment})
