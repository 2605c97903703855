"""What ``audit.check`` says: places, text, numbers by hand, what it needs, and the pages of its codes."""

import re
from pathlib import Path

import pytest
import torch

from rlprims import audit
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from tests.audit.bugs import BUGS, PLAIN, planted
from tests.audit.steps import make, named

MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_a_place_a_number_and_what_to_write() -> None:
    """By hand: |A| is 1, 1 and 2, 2, 2; the padding is row 0, token 1: 1 of 8."""
    advantages = torch.tensor([[1.0, 1.0, 0.0], [-2.0, -2.0, -2.0]])
    batch = {"response_mask": MASK, "advantages": advantages, "attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]])}
    (finding,) = audit.check(batch).findings
    assert (finding.code, finding.severity, finding.tokens) == ("M4", "error", ((0, 1),))
    assert finding.consequence == "12.5% of the sum of |A| is on padding"
    assert finding.message.endswith("row 0, token 1")
    assert "attention_mask" in finding.fix


class Words:
    """A tokenizer of four words."""

    eos_token_id, bos_token_id = 3, 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(["begin", "one", "two", "end"][token] for token in ids)


def test_a_tokenizer_shows_the_text_and_knows_its_end() -> None:
    responses = torch.tensor([[1, 3, 0], [2, 1, 3]])
    batch = {"response_mask": MASK, "responses": responses, "ended": torch.tensor([Ended.STOP, Ended.LENGTH])}
    checked = audit.check(batch, tokenizer=Words())
    (finding,) = checked.findings
    assert finding.code == "M7"
    assert finding.message.endswith("row 1, token 2: 'two one' ['end'] ''")
    assert audit.check(batch).silent["M7"] == "needs a tokenizer, for its end token"


def test_the_bias_of_a_temperature_by_hand() -> None:
    """A sampler at temperature T draws x with log-prob l; of logits T l the trainer makes exactly T l if all are equal.

    Here d = (T - 1) l on every token, so the slope of trainer by sampler is T, and the mean weight exp(mean d).
    """
    sampler = -torch.linspace(0.5, 2.5, 90).view(3, 30)
    batch = {"response_mask": torch.ones(3, 30).bool(), "rollout_log_probs": sampler, "old_log_probs": 0.9 * sampler}
    (finding,) = audit.check(batch).findings
    assert finding.code == "L1"
    assert "0.90 times" in finding.message
    assert "+16.2%" in finding.consequence  # exp(0.1 x 1.5) - 1


def test_what_is_missing_is_said() -> None:
    checked = audit.check({"response_mask": MASK})
    assert checked.findings == ()
    assert str(checked) == "no findings"
    assert checked.silent["M4"] == "needs attention_mask"
    assert set(checked.silent) == set(audit.CHECKS) - {"N1"}
    with pytest.raises(ValueError, match="expected response_mask"):
        audit.check({"advantages": torch.zeros(2, 2)})


def test_columns_of_other_shapes_are_no_crash() -> None:
    data, _ = make(PLAIN, 0)
    odd = data | {name: data[name][:, :3] for name in ("entropies", "attention_mask", "prompts")}
    assert not [each for each in audit.check(odd).findings if each.severity == "error"]


def test_a_data_proto_is_read_and_nothing_is_changed() -> None:
    data, _ = make(PLAIN, 0)
    before = {name: x.clone() for name, x in data.items()}
    found = audit.check(DataProto.from_dict(data))
    assert found.findings == ()
    assert all(torch.equal(data[name], x) for name, x in before.items())


def test_errors_come_before_notes_and_a_cause_hides_its_effects() -> None:
    data, _ = make(PLAIN, 0)
    data["entropies"][0, 0] = -1.0
    data["weights_version"] = torch.arange(32) % 4
    size = (0.3 * (3 - data["weights_version"]))[:, None]
    data["old_log_probs"] -= size * torch.rand(32, 28)
    checked = audit.check(data)
    assert [each.severity for each in checked.findings] == sorted(each.severity for each in checked.findings)
    late = next(each for each in BUGS if each.code == "M1")
    assert audit.check(planted(late, 3)).codes == ("M1",)  # padding is learned too, because of it


def test_every_code_has_a_page_and_a_row_in_the_docs() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "audit.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([MGARLKN]\d+) \| (.+?) \|", page, re.MULTILINE))
    assert set(rows) == set(audit.CHECKS)
    for code, look in audit.CHECKS.items():
        first = (look.__doc__ or "").splitlines()[0]
        assert rows[code] == first, code
        words = ("Usual cause:", "Reported if", "Write:", "Needs")
        assert all(word in (look.__doc__ or "") for word in words), code


@pytest.mark.slow
def test_what_a_message_writes_is_filled_in() -> None:
    for each in BUGS[::9]:
        for finding in audit.check(planted(each, 0)).findings:
            assert "{" not in finding.message + finding.consequence
            assert "\n" not in finding.message + finding.consequence + finding.fix
            assert re.search(r"\d", finding.consequence)


def test_a_greedy_sampler_is_no_forced_token() -> None:
    """Its log-probs are 0, which says nothing of what was sampled."""
    data, _ = make(PLAIN, 0)
    data["rollout_log_probs"] = torch.zeros(32, 28)
    assert audit.check(data).findings == ()


def test_names_of_trl_are_read() -> None:
    data, _ = make(PLAIN, 0)
    trl = {"completion_mask": data["response_mask"], "completion_ids": data["responses"], "prompt_ids": data["prompts"]}
    trl |= {"old_per_token_logps": data["old_log_probs"], "sampling_per_token_logps": data["rollout_log_probs"]}
    trl["sampling_per_token_logps"] = trl["sampling_per_token_logps"].roll(1, 1)
    assert "L5" in audit.check({**trl, "temperature": 1.0}).codes
    assert named(data, PLAIN) == data
    both = {**data, "prompt_ids": ["no", "tensor"] * 16}  # the name of this library is the one that counts
    assert "G1" not in audit.check(both).silent


def test_a_mask_that_lacks_one_token_of_every_row_is_an_error_and_one_that_lacks_a_turn_a_note() -> None:
    sampled = torch.arange(6) < torch.tensor([6, 3, 5, 4])[:, None]
    columns = {"rollout_log_probs": -0.5 * sampled, "log_probs": -0.5 * sampled}
    short = torch.arange(6) < torch.tensor([5, 2, 4, 3])[:, None]
    (finding,) = audit.check({**columns, "response_mask": short}).findings
    assert (finding.code, finding.severity, finding.tokens[0]) == ("M10", "error", (0, 5))
    (finding,) = audit.check(
        {**columns, "response_mask": torch.arange(6) < torch.tensor([2, 3, 5, 4])[:, None]}
    ).findings
    assert (finding.code, finding.severity) == ("M10", "note")
