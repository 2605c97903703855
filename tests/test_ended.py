"""Why a response ended: codes and names, and what an algorithm makes of each."""

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from examples import tabular
from examples.simulate import simulate
from rlprims import advantage, algorithms, filters, losses, rewards
from rlprims.algorithms import (
    Algorithm,
    Endings,
    estimate_advantages,
    fill_invalid_scores,
    filter_groups,
    leave_out_rows,
    mask_turns,
    shape_scores,
    use,
)
from rlprims.data_proto import DataProto
from rlprims.ended import CUT_OFF, LABELS, Ended, EndedName
from rlprims.masking import ended_by
from rlprims.turns import Turn, merge, to_batch

PLAIN = algorithms.dr_grpo(max_length=10)


def codes(*reasons: Ended) -> Tensor:
    return torch.tensor(reasons, dtype=torch.int8)


def batch(**more: Tensor) -> dict[str, Tensor]:
    """Two groups of two responses of three tokens, in two turns."""
    return {
        "response_mask": torch.tensor([[True, True, True]] * 3 + [[True, False, True]]),
        "turn_ids": torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 0, 1]]),
        "scores": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "acc": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "ended": codes(Ended.STOP, Ended.PARSE_ERROR, Ended.STOP, Ended.STOP),
        **more,
    }


def prepared(algorithm: Algorithm, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a trainer goes through the stages."""
    data |= leave_out_rows(algorithm, data)
    data |= fill_invalid_scores(algorithm, data)
    data |= shape_scores(algorithm, data)
    data |= estimate_advantages(algorithm, data)
    return data | mask_turns(algorithm, data)


class TestNames:
    def test_names_and_codes_are_one_to_one_and_stay_as_they_are(self) -> None:
        """Recorded batches and rollouts are read by them."""
        assert LABELS == get_args(EndedName) == tuple(Endings.model_fields)
        assert {name: int(Ended.from_label(name)) for name in LABELS} == {
            "stop": 0, "length": 1, "turns": 2, "context": 3, "parse_error": 4, "timeout": 5, "error": 6, "aborted": 7,
        }  # fmt: skip
        assert ["stop", *CUT_OFF] == [Ended(code).label for code in range(8)]

    def test_an_unknown_name_is_refused_with_those_that_there_are(self) -> None:
        with pytest.raises(ValueError, match="ended is 'abort', expected 'stop' or 'length' or 'turns'"):
            Ended.from_label("abort")
        with pytest.raises(ValueError, match="ended is 'tool', expected"):
            Turn([1], [2], [-0.5], finish="tool")  # type: ignore[arg-type]

    def test_it_is_saved_and_read(self, tmp_path: Any) -> None:
        data = DataProto.from_dict(tensors={"ended": codes(*Ended)})
        data.save(tmp_path / "batch")
        read = DataProto.load(tmp_path / "batch")
        assert read["ended"].dtype is torch.int8
        assert [Ended(code) for code in read["ended"].tolist()] == [*Ended]
        assert json.loads(json.dumps({"ended": Ended.CONTEXT.label})) == {"ended": "context"}

    def test_a_turn_s_reason_is_its_row_s(self) -> None:
        turns = [Turn([1], [2], [-0.5]), Turn([1, 2, 3], [4], [-0.5], finish="context")]
        data = to_batch([merge(turns), merge(turns[:1])], ["a", "a"], pad_id=0)
        assert data["ended"].tolist() == [Ended.CONTEXT, Ended.STOP]

    def test_several_reasons_at_once(self) -> None:
        assert ended_by(codes(*Ended), ("stop", "error")).tolist() == [code in (0, 6) for code in range(8)]
        assert not ended_by(codes(*Ended), ()).any()


class TestPolicies:
    def test_what_is_scored_changes_nothing(self) -> None:
        scored, untold = prepared(PLAIN, batch()), prepared(PLAIN, {k: v for k, v in batch().items() if k != "ended"})
        assert torch.equal(scored["advantages"], untold["advantages"])
        assert "valid_rows" not in scored

    @pytest.mark.parametrize("reason", ["timeout", "error", "aborted"])
    def test_what_is_not_the_policy_s_doing_drops_its_group(self, reason: str) -> None:
        data = batch(ended=codes(Ended.STOP, Ended.STOP, Ended.from_label(reason), Ended.PARSE_ERROR))
        assert filter_groups(PLAIN, data) == [None, None, *[f"a response ended by {reason}"] * 2]
        assert filter_groups(PLAIN.replace(ended={reason: "score"}), data) == [None] * 4

    def test_how_it_ended_is_said_before_what_it_scored(self) -> None:
        data = batch(ended=codes(Ended.ERROR, *[Ended.STOP] * 3), scores=torch.tensor([torch.nan, 0.0, torch.nan, 0.0]))
        assert filter_groups(PLAIN, data) == [*["a response ended by error"] * 2, *["a score is not finite"] * 2]

    def test_a_rollout_ended_as_its_last_row_did(self) -> None:
        """Two rows of the first rollout: the window was full, the context was rewritten, and it went on."""
        ids = torch.tensor([0, 0, 1, 2])
        went_on = batch(ended=codes(Ended.CONTEXT, *[Ended.STOP] * 3), scores=torch.ones(4), trajectory_ids=ids)
        failed = batch(
            ended=codes(Ended.STOP, Ended.CONTEXT, *[Ended.STOP] * 2), scores=torch.ones(4), trajectory_ids=ids
        )
        dropping, leaving = (PLAIN.replace(ended={"context": policy}) for policy in ("drop_group", "leave_out"))
        assert filter_groups(dropping, went_on) == [None] * 4
        assert filter_groups(dropping, failed) == [*["a response ended by context"] * 2, None, None]
        assert leave_out_rows(leaving, went_on)["valid_rows"].all()
        assert leave_out_rows(leaving, failed)["valid_rows"].tolist() == [False, False, True, True]
        complete = algorithms.dapo().replace(filter={"keep": filters.completed_groups})
        assert [reason is None for reason in filter_groups(complete, failed)] == [False, False, True, True]
        cut = use(rewards.truncation_penalty, penalty=1.0, reasons=("context",))
        shaped = [shape_scores(PLAIN.replace(score_shaping=[cut]), data)["shaped_scores"] for data in (went_on, failed)]
        assert [x.tolist() for x in shaped] == [[1.0] * 4, [0.0, 0.0, 1.0, 1.0]]
        masked = mask_turns(PLAIN.replace(ended={"context": "mask_turn"}), went_on | {"advantages": torch.ones(4, 3)})
        assert masked["response_mask"][0].tolist() == [True, True, False]  # a turn ended so, and is the row's

    def test_what_is_left_out_is_in_no_statistic(self) -> None:
        """Of three, the mean is that of the two others; its own score may be unknown."""
        ids = torch.tensor([0, 0, 0, 1])
        scores = torch.tensor([1.0, torch.nan, 0.0, 0.0])
        leaving = PLAIN.replace(ended={"parse_error": "leave_out"})
        data = prepared(leaving, batch(group_ids=ids, scores=scores))
        assert data["valid_rows"].tolist() == [True, False, True, True]
        assert data["advantages"].tolist() == [[0.5] * 3, [0.0] * 3, [-0.5] * 3, [0.0] * 3]
        assert filter_groups(leaving, data) == [None] * 4

    def test_a_filter_sees_the_others_in_its_place(self) -> None:
        leaving = algorithms.dapo().replace(ended={"parse_error": "leave_out"})
        data = batch(acc=torch.tensor([1.0, 0.0, 1.0, 0.0]))
        data |= leave_out_rows(leaving, data)
        assert filter_groups(leaving, fill_invalid_scores(leaving, data)) == [*["acc is 1 throughout"] * 2, None, None]

    def test_it_joins_what_was_left_out_before(self) -> None:
        leaving = PLAIN.replace(ended={"parse_error": "leave_out"})
        found = leave_out_rows(leaving, batch(valid_rows=torch.tensor([False, True, True, True])))
        assert found["valid_rows"].tolist() == [False, False, True, True]

    def test_a_masked_turn_keeps_its_score_in_the_group_and_is_in_no_loss(self) -> None:
        masking = PLAIN.replace(ended={"parse_error": "mask_turn"})
        data = prepared(masking, batch())
        assert data["response_mask"].tolist() == [[True] * 3, [True, False, False], [True] * 3, [True, False, True]]
        assert data["advantages"][:2].tolist() == [[0.5] * 3, [-0.5, 0.0, 0.0]]
        log_probs = torch.zeros(4, 3, requires_grad=True)
        losses_ = losses.clipped_surrogate(log_probs, torch.zeros(4, 3), data["advantages"], data["response_mask"])
        losses.token_mean(losses_, data["response_mask"]).backward()
        assert log_probs.grad is not None
        assert (log_probs.grad[1] != 0).tolist() == [True, False, False]
        assert float(log_probs.grad[0, 0]) == pytest.approx(-0.5 / 9)  # of 9 tokens, not of 11

    def test_without_turns_the_whole_response_is_masked(self) -> None:
        masking = PLAIN.replace(ended={"parse_error": "mask_turn"})
        data = prepared(masking, {name: x for name, x in batch().items() if name != "turn_ids"})
        assert data["response_mask"].any(-1).tolist() == [True, False, True, True]

    def test_tool_output_after_the_last_turn_is_none(self) -> None:
        """The last turn is that of the last sampled token."""
        masking = PLAIN.replace(ended={"stop": "mask_turn"})
        data = prepared(masking, batch(turn_ids=torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 1, 1]])))
        assert data["response_mask"][3].tolist() == [True, False, False]

    def test_padded_and_packed_agree(self) -> None:
        masking = PLAIN.replace(ended={"parse_error": "mask_turn"})
        padded = batch(advantages=torch.ones(4, 3))
        packed = {name: x.flatten() if x.dim() == 2 else x for name, x in padded.items()}
        packed["cu_seqlens"] = torch.tensor([0, 3, 6, 9, 12])
        got, want = mask_turns(masking, packed), mask_turns(masking, padded)
        for name, column in want.items():
            assert torch.equal(got[name], column.flatten())


class TestSpecs:
    def test_it_is_stored_and_compared(self) -> None:
        changed = algorithms.grpo().replace(ended={"length": "mask_turn", "timeout": "leave_out"})
        assert Algorithm.from_json(changed.to_json()) == changed
        assert algorithms.diff(algorithms.grpo(), changed) == {
            "ended.length": ("score", "mask_turn"),
            "ended.timeout": ("drop_group", "leave_out"),
        }
        assert hash(changed) != hash(algorithms.grpo())

    def test_an_unknown_reason_or_policy_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"ended.tired: Extra inputs"):
            PLAIN.replace(ended={"tired": "score"})
        with pytest.raises(ValueError, match=r"ended.length: Input should be 'score', 'leave_out'"):
            PLAIN.replace(ended={"length": "forget"})

    def test_leaving_out_needs_an_estimator_that_can(self) -> None:
        leaving = {"length": "leave_out"}
        assert algorithms.check(algorithms.dapo().replace(ended=leaving)) == []
        (finding,) = algorithms.check(algorithms.remax().replace(ended=leaving))
        assert finding.severity == "error"
        assert "advantage.remax does not take valid_rows" in finding.message
        (finding,) = algorithms.check(algorithms.dr_grpo().replace(ended=leaving, normalization=advantage.whiten))
        assert "advantage.whiten does not take valid_rows" in finding.message


class TestInTheLab:
    """Answers of up to three tokens, of which 1, 0 is right; those without an end are LENGTH."""

    task: Callable[[], tabular.TabularTask] = staticmethod(lambda: tabular.stop_after((1,), length=3))

    def test_the_policy_that_is_masked_there_is_not_taught_to_end(self) -> None:
        """Endless answers are wrong. Masked, they still lower the mean, and no token of theirs is pushed."""
        sample = self.task().sample(self.task().uniform(), 64, torch.Generator().manual_seed(0))
        endless = sample["ended"] == Ended.LENGTH
        assert 0 < int(endless.sum()) < 64
        table = simulate(PLAIN.replace(ended={"length": "mask_turn"}), sample)
        pushed = torch.zeros(64, 3, dtype=torch.float64)
        pushed[table["row"], table["position"]] = torch.tensor(table["gradient"], dtype=torch.float64)
        last = torch.tensor([False, False, True])  # every token is a turn there
        assert not pushed[endless][:, last].any()
        assert pushed[endless][:, ~last].any()
        both = simulate(PLAIN, sample)
        first = [i for i, (row, position) in enumerate(zip(both["row"], both["position"], strict=True)) if not position]
        assert [table["advantage"][i] for i in first] == [both["advantage"][i] for i in first]

    @pytest.mark.parametrize("policy", ["score", "leave_out", "mask_turn"])
    def test_every_policy_learns(self, policy: str) -> None:
        run = tabular.train(
            self.task(), PLAIN.replace(ended={"length": policy}, group_size=16), steps=60, learning_rate=0.2
        )
        assert run.expected_scores[-1] > 0.9

    def test_dropped_groups_have_no_advantages(self) -> None:
        run = tabular.train(self.task(), PLAIN.replace(ended={"length": "drop_group"}, group_size=64), steps=5)
        assert not run.logits.any()
