"""``rlprims check-loss`` and ``check-advantage``: the laws of a function with names of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlprims.cli import main

NAMES = "logp=log_probs,old_logp=old_log_probs,adv=advantages,mask=response_mask"
MINE = '''
import torch

def careful(logp, old_logp, adv, mask, clip=0.2):
    """GRPO's loss, where nothing outside the mask is read and no exponent overflows."""
    logp, old_logp, adv = (torch.where(mask, x, 0).to(torch.promote_types(x.dtype, torch.float32))
                           for x in (logp, old_logp, adv))
    difference = logp.clamp(min=-1e4) - old_logp.clamp(min=-1e4)
    ratio = difference.clamp(-20, 20).exp()
    losses = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return losses.sum() / mask.sum().clamp(min=1), {"ratio": 1.0}

def usual(logp, old_logp, adv, mask, clip):
    ratio = (logp - old_logp).exp()
    losses = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (losses * mask).sum() / mask.sum()

def by_position(logp, old_logp, adv, mask):
    """The row's number is in the loss."""
    return (logp * adv * mask).sum(-1) * torch.arange(len(logp))

def whole_row(token_rewards, response_mask):
    return token_rewards.sum(-1, keepdim=True) * response_mask

def configured(log_probs, config):
    return log_probs * config.scale
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_of_a_trainer.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_of_a_trainer", raising=False)
    return tmp_path


def programs(said: str) -> dict[str, str]:
    """By the laws that are broken, what is printed below them."""
    parts = [part.partition("\n") for part in said.split("\nbroken: ")[1:]]
    return {laws: text[text.index("# mine") :] for laws, _, text in parts if "# mine" in text}


def run(program: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_usual_loss_breaks_laws_and_each_program_shows_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check-loss", "mine_of_a_trainer:usual", "--arguments", f"{NAMES},clip=0.2"]
    assert main(command) == 1
    said = capsys.readouterr().out
    satisfied, *_ = said.splitlines()
    assert "gradient is the derivative" in satisfied
    assert "rows may be permuted" in satisfied
    assert "masked is absent" not in satisfied
    found = programs(said)
    assert set(found) == {
        *("masked is absent", "nothing valid gives zero"),
        *("far log ratios are finite", "impossible tokens are finite"),
    }
    for laws, program in found.items():
        assert "clip=0.2" in program
        assert "rlprims" not in program
        assert len(program.splitlines()) <= 20, laws
        first, second = run(program, here).split("tensor(", 1)[1].split("\ntensor(", 1)
        assert not {"nan", "inf"} & set(first.replace("[", " ").replace(",", " ").split())
        assert "nan" in second, "the changed batch has another result"


def test_a_careful_loss_satisfies_all(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-loss", f"{here}/mine_of_a_trainer.py:careful", "--arguments", NAMES]) == 0
    said = capsys.readouterr().out
    assert said.startswith("satisfied: ")
    assert "broken" not in said
    assert said.count(",") == 13, "fourteen laws of a mean"


def test_one_of_ours_and_one_that_reads_the_rows_number(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-loss", "rlprims.losses.clipped_surrogate"]) == 0
    assert "on policy it is reinforce" in capsys.readouterr().out
    assert main(["check-loss", "mine_of_a_trainer:by_position", "--arguments", NAMES]) == 1
    broken = [line for line in capsys.readouterr().out.splitlines() if line.startswith("broken: ")]
    assert any("rows may be permuted" in line for line in broken)
    assert any("batches may be merged" in line for line in broken)


def test_an_estimator_that_sums_its_padding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check-advantage", "mine_of_a_trainer:whole_row", "--arguments", "token_rewards=rewards"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "rows may be permuted" in said.splitlines()[0]
    found = programs(said)
    (padded,) = (program for laws, program in found.items() if "padding changes nothing" in laws)
    first, second = run(padded, here).split("\ntensor(")
    assert first.count("]") == second.count("]") == 4
    assert first.split("[[")[1] != second.split("[[")[1]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["mine_of_a_trainer:usual", "--arguments", NAMES],
            "needs clip: write its name in the vocabulary or a value, clip=0.2",
        ),
        (["mine_of_a_trainer:usual", "--arguments", "logits=log_probs"], "no parameter 'logits': expected one of logp"),
        (["mine_of_a_trainer:usual", "--arguments", f"{NAMES},clip"], "expected name=value, got 'clip'"),
        (
            ["mine_of_a_trainer:careful", "--arguments", NAMES.replace("adv=adv", "adv=av")],
            "adv=avantages is not in the vocabulary: did you mean advantages?",
        ),
        (
            ["mine_of_a_trainer:configured", "--arguments", 'config="word"'],
            "fails on 8 rows of 6 tokens: AttributeError",
        ),
        (["mine_of_a_trainer:none", "--arguments", NAMES], "has no attribute 'none'"),
        (["no_such_module:none"], "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_called_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str], said: str
) -> None:
    assert main(["check-loss", *command]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
