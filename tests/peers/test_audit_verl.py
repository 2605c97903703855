"""What verl 0.9's trainer and actor compute, under verl's names: ``audit.identify`` says which formula it is."""

import sys
from pathlib import Path

import pytest
import torch

from examples.audit_hooks import verl
from rlprims import advantage, audit, losses
from rlprims.algorithms import BoundFunction, use
from rlprims.cli import main
from tests.peers.test_verl_install import (
    PROMPT,
    UIDS,
    AlgoConfig,
    B,
    DataProto,
    T,
    batch,
    by_verl,
    compute_advantage,
    step,
)

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

ESTIMATORS = {
    ("grpo", True): use(advantage.grpo),
    ("grpo", False): use(advantage.grpo, normalize_std=False),
    ("rloo", True): use(advantage.rloo),
    ("opo", True): use(advantage.opo),
    ("remax", True): use(advantage.remax),
    ("reinforce_plus_plus", True): use(advantage.reinforce_pp),
    ("reinforce_plus_plus_baseline", True): use(advantage.reinforce_pp_baseline),
    ("gae", True): use(advantage.gae, lam=1.0),
}


def is_among(expected: BoundFunction, found: audit.Found, stage: str) -> bool:
    """Whether it is the formula, or one that the answer lists because this batch cannot tell them apart."""
    part = found.parts[stage]
    if expected.fn is not part.fn:
        return expected.path.removeprefix("rlprims.") in found.undecided["the function"]
    given, values = part.hyperparameters, expected.hyperparameters
    return all(values[name] in (given[name], *found.undecided.get(name, ())) for name in values)


def trainers_columns() -> dict[str, object]:
    data = batch()
    return {
        "token_level_rewards": data["rewards"],
        "response_mask": data["response_mask"].long(),
        "values": data["values"],
        "reward_baselines": data["baseline_scores"],
        "uid": UIDS,
    }


@pytest.mark.parametrize(("estimator", "by_std"), ESTIMATORS)
def test_the_trainers_advantages_are_named(estimator: str, by_std: bool) -> None:
    computed = by_verl(estimator, norm_adv_by_std_in_grpo=by_std)
    found = audit.identify({**trainers_columns(), "advantages": computed})["advantages"]
    assert is_among(ESTIMATORS[estimator, by_std], found, "advantage")
    assert (estimator == "gae") == ("normalization" in found.parts)


CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
ACTORS = {
    ("vanilla", "token-mean"): use(losses.clipped_surrogate, **CLIPS, dual_clip=3.0),
    ("vanilla", "seq-mean-token-sum"): use(losses.clipped_surrogate, **CLIPS, dual_clip=3.0),
    ("vanilla", "seq-mean-token-mean"): use(losses.clipped_surrogate, **CLIPS, dual_clip=3.0),
    ("gpg", "token-mean"): use(losses.reinforce),
    ("gspo", "seq-mean-token-mean"): use(losses.gspo_token, **CLIPS),
    ("sapo", "seq-mean-token-mean"): use(losses.sapo),
    ("cispo", "token-mean"): use(losses.cispo, w_min=0.8, w_max=1.28),
}


@pytest.mark.parametrize(("loss_mode", "mean"), ACTORS)
def test_the_actors_gradient_is_named(loss_mode: str, mean: str) -> None:
    """The factor 2 is verl's: FSDP takes the mean of the gradients of two ranks."""
    data = batch()
    _, gradient, _ = step(loss_mode, loss_agg_mode=mean)
    columns = {name: data[name] for name in ("response_mask", "log_probs", "old_log_probs", "advantages")}
    columns |= {"gradients": gradient, "rollout_is_weights": data["rollout_is_weights"]}
    found = audit.identify(columns, options={"w_max": [1.28]}, tolerance=1e-4)
    assert is_among(ACTORS[loss_mode, mean], found["loss"], "policy_loss")
    assert found["loss"].said.startswith("2 x ")
    assert found["mean"].said == f"losses.{mean.replace('-', '_')}"


def test_a_step_without_the_weights_is_not_named() -> None:
    """The same gradient, and the column of weights left out: no formula fits, and none is made up."""
    data = batch()
    _, gradient, _ = step("vanilla", loss_agg_mode="token-mean")
    columns = {name: data[name] for name in ("response_mask", "log_probs", "old_log_probs", "advantages")}
    found = audit.identify({**columns, "gradients": gradient, "ref_log_probs": torch.zeros_like(gradient) - 1})
    assert not found["loss"].parts


def before_update_actor() -> DataProto:
    """What ``RayPPOTrainer.fit`` has there: the rollouts of GRPO with their log-probs and advantages."""
    data, prompts = batch(), torch.ones(B, PROMPT, dtype=torch.long)
    attention = torch.arange(T) < data["lengths"][:, None]
    tensors = {
        "prompts": prompts,
        "responses": torch.arange(B * T).view(B, T) + 5,
        "attention_mask": torch.cat([prompts, attention.long()], 1),
        "response_mask": data["response_mask"].long(),
        "token_level_scores": data["rewards"],
        "token_level_rewards": data["rewards"],
        "old_log_probs": data["old_log_probs"],
        "rollout_log_probs": data["old_log_probs"],
    }
    settings = AlgoConfig(adv_estimator="grpo")
    return compute_advantage(
        DataProto.from_dict(tensors, non_tensors={"uid": UIDS}),
        adv_estimator="grpo",
        gamma=1.0,
        lam=1.0,
        norm_adv_by_std_in_grpo=True,
        config=settings,
    )


def test_the_hook_before_update_actor(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    columns = verl(before_update_actor(), page=str(tmp_path / "page.html"))
    assert "advantages: advantage.grpo" in capsys.readouterr().out
    assert columns["uid"].tolist() == UIDS.tolist()
    assert "advantage.grpo" in (tmp_path / "page.html").read_text()
    flipped = before_update_actor()
    flipped.batch["advantages"] *= -1
    verl(flipped)
    assert "advantages: none" in capsys.readouterr().out


def test_a_dump_that_verl_wrote(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    texts = ["2+2"] * 2, ["it is 4", "5"], ["4"] * 2, [1.0, 0.0]
    trainer = sys.modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer
    trainer._write_generations(*texts, {"acc": [1.0, 0.0]}, str(tmp_path), 3)
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "3.jsonl")]) == 0
    assert "not told: formulas" in capsys.readouterr().out
