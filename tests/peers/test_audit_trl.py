"""The steps of TRL 1.16's own trainers, read by a hook: ``audit.identify`` names what its configuration says."""

import re

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from rlprims import audit
from tests.peers.test_trl_trainer import LENGTH, MATCHES, RLOO_MATCHES, Recording, digits, spread, train

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


READ = ("completion_mask", "advantages", "old_per_token_logps", "ref_per_token_logps")
IDS = ("prompt_ids", "prompt_mask", "completion_ids")


class Audited:
    """Each optimizer step's columns: the hook that docs/audit.md shows."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.steps, self.micro_batches = [], []

    def _get_per_token_logps_and_entropies(self, *args, **settings):
        found = super()._get_per_token_logps_and_entropies(*args, **settings)
        self.log_probs = found[0]
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.log_probs.retain_grad()
        self.columns = {name: x for name, x in inputs.items() if name in READ + IDS}
        return loss

    def training_step(self, *args):
        loss = super().training_step(*args)  # the backward pass, with all that scales the loss
        log_probs = self.log_probs.detach()
        columns = {
            "old_per_token_logps": log_probs,
            **self.columns,
            "log_probs": log_probs,
            "gradients": self.log_probs.grad,
        }
        columns["micro_batches"] = torch.full((len(log_probs),), len(self.micro_batches))
        self.micro_batches.append(columns)
        if len(self.micro_batches) == self.args.gradient_accumulation_steps:
            self.steps.append({name: torch.cat([each[name] for each in self.micro_batches]) for name in columns})
            self.micro_batches = []
        return loss


class AuditedGRPO(Audited, Recording, GRPOTrainer):
    pass


class AuditedRLOO(Audited, Recording, RLOOTrainer):
    pass


WINDOW = r"0.97\d* x "
"""The denominator is not the step's tokens: TRL divides those of the generation batch by its number of steps."""
NAMES = {
    "dapo": (WINDOW + r"losses.clipped_surrogate\(clip_high=0.28\)", "losses.token_mean"),
    "grpo": (r"losses.clipped_surrogate \+ 0.04 x losses.weighted_kl", "losses.seq_mean_token_mean"),
    "grpo with the plain KL": (
        r"losses.clipped_surrogate \+ 0.04 x losses.kl\(value='k3'\)",
        "losses.seq_mean_token_mean",
    ),
    "dr_grpo": ("losses.clipped_surrogate", f"losses.seq_mean_token_sum_norm(length={LENGTH}.0)"),
    "gspo": ("losses.gspo", "losses.seq_mean_token_mean"),
    "cispo": (WINDOW + "losses.cispo", "losses.token_mean"),
    "gdpo": (WINDOW + "losses.clipped_surrogate", "losses.token_mean"),
    "plain": (r"losses.gspo\(.*mean='product'\)", "losses.seq_mean_token_mean"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_trl_made_is_named(name, tmp_path):
    """A step of the second pass over its samples, so ratios are not 1."""
    settings = {**MATCHES, **RLOO_MATCHES}[name][1]
    rewards = (digits, spread) if name == "gdpo" else (digits,)
    trainer_class = AuditedRLOO if name in RLOO_MATCHES else AuditedGRPO
    _, _, trainer = train(trainer_class, tmp_path, steps=4, reward_funcs=rewards, **settings)
    step = trainer.steps[3]
    if name in RLOO_MATCHES:  # TRL keeps the old log-probs of responses, not of tokens: those of the first step
        step = {**trainer.steps[2], "old_per_token_logps": trainer.steps[0]["log_probs"]}
    found = audit.identify(step, tolerance=1e-4)  # TRL's log-probs are float32
    attention = torch.cat([step["prompt_mask"], step["completion_mask"]], 1)
    checked = audit.check(
        {**step, "attention_mask": attention}
    )  # nothing is wrong but the denominator, which is a note
    assert checked.codes == (("N3",) if WINDOW in NAMES[name][0] else ())
    assert {"M4", "M8", "M9"} <= set(audit.CHECKS) - set(checked.silent)
    loss, mean = NAMES[name]
    assert re.fullmatch(loss, found["loss"].said)
    assert mean in (found["mean"].said, *found["mean"].undecided.get("aggregation", ()))


def test_a_first_pass_cannot_tell_the_clips_apart(tmp_path):
    _, _, trainer = train(AuditedGRPO, tmp_path, steps=1, **MATCHES["grpo"][1])
    found = audit.identify(trainer.steps[0], tolerance=1e-4)["loss"]
    assert found.said == "losses.clipped_surrogate"
    assert {0.1, 0.28} <= set(found.undecided["clip_high"])
    assert "losses.reinforce" in found.undecided["the function"]
