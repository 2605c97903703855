"""The steps of TRL 1.16's own trainers, read by a hook: ``audit.identify`` names what its configuration says."""

import re

import pytest
from trl import GRPOTrainer, RLOOTrainer

from examples.audit_hooks import TRL
from rlprims import audit
from tests.peers.test_trl_trainer import LENGTH, MATCHES, RLOO_MATCHES, Recording, digits, spread, train

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Audited(TRL):
    """The hook of examples/audit_hooks.py, which keeps every step."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.steps = []

    def audit(self, columns):
        self.steps.append(columns)
        super().audit(columns)


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
        step = {**trainer.steps[2], "old_log_probs": trainer.steps[0]["log_probs"]}
    found = audit.identify(step, tolerance=1e-4)  # TRL's log-probs are float32
    checked = audit.check(step)  # nothing is wrong but the denominator, which is a note
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


def test_the_first_step_is_printed_with_its_page(tmp_path, capsys):
    """dapo as TRL has it: the denominator is that of the generation batch, so one step of two counts 2 % less."""
    AuditedGRPO.audit_page = str(tmp_path / "audit.html")
    _, _, trainer = train(AuditedGRPO, tmp_path, steps=2, eval_strategy="no", **MATCHES["dapo"][1])
    said = capsys.readouterr().out
    assert said.count("\nmean: losses.token_mean") == 1
    assert re.search(r"loss: [01]\.\d+ x losses\.", said)
    assert not audit.report(trainer.steps[0], tolerance=1e-4).errors
    assert "losses.token_mean" in (tmp_path / "audit.html").read_text()
