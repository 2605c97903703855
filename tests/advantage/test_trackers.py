"""Baselines with a memory."""

import json
import math
from typing import Any

import pytest
import torch

from rlprims.advantage import RoleBaseline, ValueTracker, grpo, remax
from rlprims.rewards import at_last_token
from rlprims.testing import Rank, on_ranks


def scores(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


class TestRoleBaseline:
    def test_a_response_at_a_time(self) -> None:
        """b ← 0.95 b + 0.05 s, from 0, each role for itself."""
        rae, seen = RoleBaseline(), []
        for role, score in [("first", 1.0), ("second", -1.0), ("first", 1.0), ("first", -1.0)]:
            seen.append(float(rae.baseline([role])[0]))
            rae.update([role], scores(score))
        assert seen == pytest.approx([0, 0, 0.05, 0.0975])
        assert rae.baseline(["first", "second", "judge"]).tolist() == pytest.approx([0.042625, -0.05, 0])

    def test_a_batch_counts_as_so_many_and_has_no_order(self) -> None:
        one, other, single = RoleBaseline(decay=0.8), RoleBaseline(decay=0.8), RoleBaseline(decay=0.8)
        one.update(["a", "b", "a", "a"], scores(1, 7, 0, 0.5))
        other.update(["a", "a", "b", "a"], scores(0.5, 0, 7, 1))
        for _ in range(3):
            single.update(["a"], scores(0.5))
        assert one.values == other.values
        assert one.values["a"] == pytest.approx(single.values["a"])
        assert one.values["a"] == pytest.approx(0.5 * (1 - 0.8**3))

    def test_the_advantage_is_what_the_score_is_above_it(self) -> None:
        rae = RoleBaseline(decay=0.0)
        rae.update(["a"], scores(0.25))
        mask = torch.tensor([[True, True], [True, False]])
        got = remax(at_last_token(scores(1, 1), mask), rae.baseline(["a", "b"]), mask)
        assert got.tolist() == [[0.75, 0.75], [1, 0]]

    def test_one_that_is_restored_goes_on_alike(self) -> None:
        first, second = RoleBaseline(), RoleBaseline()
        first.update(["a", "b"], scores(1, -1))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for rae in (first, second):
            rae.update(["a"], scores(0.3))
        assert first.values == second.values
        second.load_state_dict({"values": {"a": 1}})
        assert type(second.values["a"]) is float
        assert first.state_dict()["values"] is not first.values

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"values": [1.0]},
            {"values": {"a": "1"}},
            {"values": {"a": None}},
            {"values": {"a": True}},
            {"values": {"a": math.nan}},
            {"values": {"a": 1.0}, "decay": 0.9},
            {"values": {3: 1.0}},
            None,
        ],
    )
    def test_a_state_of_another_kind_is_refused(self, state: Any) -> None:
        rae = RoleBaseline()
        rae.update(["a"], scores(1))
        before = dict(rae.values)
        with pytest.raises(ValueError, match="values"):
            rae.load_state_dict(state)
        assert rae.values == before

    @pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
    def test_a_decay_outside_is_refused(self, decay: float) -> None:
        with pytest.raises(ValueError, match="decay"):
            RoleBaseline(decay=decay)

    def test_scores_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ValueError, match="scores has shape"):
            RoleBaseline().update(["a"], scores(1, 2))
        with pytest.raises(ValueError, match="scores has NaN or Inf, expected finite numbers"):
            RoleBaseline().update(["a"], scores(math.nan))


class TestValueTracker:
    @pytest.mark.parametrize(
        ("kl", "rho"), [(0.0, 0.96), (0.06, 0.875), (0.006, 2**-0.1), (9.0, 0.875), (-9e9, 0.96), (0.003, 0.96)]
    )
    def test_counts_fade_as_the_policy_moves(self, kl: float, rho: float) -> None:
        """2^(−D/0.06) between 0.875 and 0.96; D = 0.006 gives 0.933."""
        tracker = ValueTracker()
        tracker.counts["x"] = (6.0, 2.0)
        tracker.update(["x"], scores(0.0), torch.tensor([kl], dtype=torch.float64))
        assert tracker.counts["x"] == pytest.approx((6 * rho, 2 * rho + 1))
        assert float(tracker.baseline(["x"])[0]) == pytest.approx(6 * rho / (8 * rho + 1))

    def test_it_starts_from_answers_of_the_first_policy(self) -> None:
        """The authors' recipe for verl: N (r + ½) / (n + 1) with N = 1 / (1 − 0.875) = 8."""
        tracker = ValueTracker()
        tracker.start(["x", "y"], [[1, 1, 0, 1, 1, 1, 1], []])
        assert tracker.counts == {"x": pytest.approx((6.5, 1.5)), "y": pytest.approx((4, 4))}
        assert tracker.baseline(["x", "y", "new"]).tolist() == pytest.approx([6.5 / 8, 0.5, 0.5])

    def test_it_is_a_moving_average_whose_step_shrinks_with_what_is_known(self) -> None:
        """v ← v + (s − v) / (ρ N + 1) with N = right + wrong."""
        tracker = ValueTracker()
        tracker.start(["x"], [[1, 0, 0]])
        before, known = 3 / 8, 8.0
        tracker.update(["x"], scores(1), scores(0))
        want = before + (1 - before) / (0.96 * known + 1)
        assert float(tracker.baseline(["x"])[0]) == pytest.approx(want)

    def test_answers_to_one_prompt_fade_its_counts_once(self) -> None:
        together, apart = ValueTracker(), ValueTracker()
        together.update(["x", "y", "x"], scores(1, 0, 0), scores(0, 0, 0.012))
        assert together.counts["x"] == pytest.approx((0.5 * 2**-0.1 + 1, 0.5 * 2**-0.1 + 1))
        apart.update(["x", "x", "y"], scores(0, 1, 0), scores(0.012, 0, 0))
        assert together.counts == apart.counts

    def test_the_advantages_of_the_paper(self) -> None:
        """(s − v) standardized over the batch: 0.5, −0.5, 0.5 have mean 1/6 and variance 1/3."""
        tracker, mask = ValueTracker(), torch.ones(3, 2, dtype=torch.bool)
        above = remax(at_last_token(scores(1, 0, 1), mask), tracker.baseline(["x", "y", "z"]), mask)[:, 0]
        got = grpo(at_last_token(above, mask), torch.zeros(3, dtype=torch.int64), mask, eps=0.0)
        assert got[:, 0].tolist() == pytest.approx([3**-0.5, -2 * 3**-0.5, 3**-0.5])

    def test_one_that_is_restored_goes_on_alike(self) -> None:
        first, second = ValueTracker(), ValueTracker()
        first.update(["x", "y"], scores(1, 0), scores(0, 0))
        state = json.loads(json.dumps(first.state_dict()))
        assert state == first.state_dict()
        second.load_state_dict(state)
        for tracker in (first, second):
            tracker.update(["x"], scores(1), scores(0.01))
        assert first.counts == second.counts

    @pytest.mark.parametrize(
        "state",
        [
            {"counts": {"x": 1.0}},
            {"counts": {"x": [1.0]}},
            {"counts": {"x": [1.0, "2"]}},
            {"counts": {"x": [1.0, math.inf]}},
            {"counts": {"x": [-1.0, 2.0]}},
            {"counts": {"x": [0.0, 0.0]}},
            {"values": {}},
        ],
    )
    def test_a_state_of_another_kind_is_refused(self, state: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="counts"):
            ValueTracker().load_state_dict(state)

    def test_counts_may_be_small_and_one_of_them_nothing(self) -> None:
        tracker = ValueTracker(min_decay=0.0)
        tracker.load_state_dict({"counts": {"x": [0.2, 0.3], "y": [0, 2]}})
        assert tracker.baseline(["x", "y"]).tolist() == pytest.approx([0.4, 0])

    @pytest.mark.parametrize(
        "wrong", [{"half_life": 0.0}, {"half_life": -1}, {"min_decay": 0.97}, {"max_decay": 1.0}, {"min_decay": -1}]
    )
    def test_bounds_that_do_not_fit_are_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ValueTracker(**wrong)

    def test_scores_that_are_no_pass_rates_are_refused(self) -> None:
        with pytest.raises(ValueError, match="scores run from -1"):
            ValueTracker().update(["x"], scores(-1), scores(0))
        with pytest.raises(ValueError, match="scores run from 0 to 2"):
            ValueTracker().start(["x"], [[0, 2]])
        with pytest.raises(ValueError, match="shorter"):
            ValueTracker().start(["x", "y"], [[1]])
        with pytest.raises(ValueError, match="kl has shape"):
            ValueTracker().update(["x"], scores(1), scores(0, 0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trackers_of_all_ranks_are_one_tracker(ranks: int) -> None:
    """Rows of one name on several ranks, and a rank without rows: each rank has the state of the whole batch."""
    names = ["a", "b", "a", "c", "b", "a"]
    scores, kl = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    home = torch.tensor([0, 1, 1, 0, 0, 1]) % ranks  # of four ranks two have none

    def states(rank: Rank | None) -> list[dict[str, Any]]:
        mine = list(range(6)) if rank is None else (home == rank.index).nonzero()[:, 0].tolist()
        options = {} if rank is None else {"all_gather": rank.all_gather_objects}
        roles, tracker = RoleBaseline(decay=0.5), ValueTracker()
        for _ in range(2):
            roles.update([names[i] for i in mine], scores[mine], **options)
            tracker.update([names[i] for i in mine], scores[mine], kl[mine], **options)
        return [roles.state_dict(), tracker.state_dict()]

    for found in on_ranks(lambda rank, _: states(rank), [None] * ranks):
        assert found == states(None)
