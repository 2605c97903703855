"""A rollout that is several rows counts once: cutting a rollout at any token changes nothing."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import advantage, algorithms, corrections, losses
from rlprims.algorithms import use
from rlprims.corrections import Weights
from rlprims.grouping import dense_ids
from rlprims.testing._cases import VOCABULARY, Batch, layout_of, make_batch
from rlprims.trajectories import by_trajectory, join_rows
from rlprims.types import PerSequence

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "clip_advantages": {"low": -1.0, "high": 1.0},
    "pkpo": {"k": 2},
    "gdpo": {"weights": (1.0, 0.5)},
    "seq_mean_token_sum_norm": {"length": 7.0},
}


def cut(batch: Batch, seed: int) -> tuple[Batch, Tensor]:
    """Each row in one to three rows of full width, in mixed order; each token is valid in one of them."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = batch.mask.shape
    pieces = []
    for row in range(rows):
        inner = torch.randint(1, width, (int(torch.randint(3, (), generator=generator)),), generator=generator)
        borders = sorted({0, *inner.tolist(), width})
        pieces.append([(row, a, b) for a, b in itertools.pairwise(borders)])
    order = []
    while any(pieces):  # rows of different rollouts in any order, those of one in theirs
        options = [piece for piece in pieces if piece]
        order.append(options[int(torch.randint(len(options), (), generator=generator))].pop(0))
    row = torch.tensor([r for r, _, _ in order])
    column = torch.arange(width)
    inside = torch.stack([(column >= a) & (column < b) for _, a, b in order])
    data = {name: x[row] for name, x in batch.data.items()}
    for name, x in data.items():
        if layout_of(name) == "token" and x.is_floating_point():
            here = inside.view(*inside.shape, *[1] * (x.dim() - 2))
            data[name] = torch.where(here, x, torch.nan)
    data["response_mask"] = data["response_mask"] & inside
    data["group_ids"] = dense_ids(data["group_ids"])
    return Batch(data), row


def without_ids(batch: Batch) -> dict[str, Tensor]:
    """The data where each row is a rollout."""
    return {name: x for name, x in batch.data.items() if not name.startswith("trajectory_")}


def arguments(fn: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    return {name: batch.data[name] for name in inspect.signature(fn).parameters if name in batch.data}


def call(fn: Callable[..., Any], batch: Batch) -> Tensor:
    result = fn(**arguments(fn, batch), **HYPERPARAMETERS.get(fn.__name__, {}))
    return result.values if isinstance(result, Weights) else result


def names(package: Any, kinds: tuple[str, ...]) -> list[Any]:
    found = []
    for name in package.__all__:
        fn = getattr(package, name)
        if inspect.isclass(fn) or not callable(fn):
            continue
        signature = inspect.signature(fn)
        if signature.return_annotation is PerSequence:
            continue
        data = {p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
        known = data <= {*VOCABULARY, "cu_seqlens", "totals", "valid_rows"}
        if known and {"cu_seqlens", "response_mask"} <= data and any(kind in data for kind in kinds):
            found.append(pytest.param(fn, id=f"{package.__name__.removeprefix('rlprims.')}.{name}"))
    return found


TOKEN_FUNCTIONS = [
    *names(advantage, ("rewards", "advantages", "component_scores")),
    *names(losses, ("log_probs", "new_values", "entropies")),
    *names(corrections, ("old_log_probs",)),
]


@pytest.mark.parametrize("fn", TOKEN_FUNCTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_cutting_a_rollout_changes_no_number(fn: Callable[..., Any], seed: int) -> None:
    whole = make_batch(seed)
    whole = whole.replace(valid_rows=torch.ones_like(whole.data["valid_rows"]))
    pieces, row = cut(whole, seed)
    expected = call(fn, whole)
    got = by_trajectory(fn)(**arguments(fn, pieces), **HYPERPARAMETERS.get(fn.__name__, {}), trajectory_ids=row)
    got = got.values if isinstance(got, Weights) else got
    inside = pieces.mask
    torch.testing.assert_close(got[inside], expected[row][inside], rtol=1e-12, atol=1e-12)
    assert not got[~inside].any()


@pytest.mark.parametrize("name", [name for name in losses.__all__ if name.startswith(("seq_", "token_m", "prompt_"))])
def test_cutting_a_rollout_changes_no_aggregation_and_no_gradient(name: str) -> None:
    fn = getattr(losses, name)
    whole = make_batch(2)
    pieces, row = cut(whole, 2)
    x = whole.data["losses"].clone().requires_grad_()
    value = call(fn, whole.replace(losses=x))
    (gradient,) = torch.autograd.grad(value, x)
    y = pieces.data["losses"].clone().requires_grad_()
    cut_value = by_trajectory(fn)(
        **arguments(fn, pieces.replace(losses=y)), **HYPERPARAMETERS.get(name, {}), trajectory_ids=row
    )
    (cut_gradient,) = torch.autograd.grad(cut_value, y)
    torch.testing.assert_close(cut_value, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cut_gradient[pieces.mask], gradient[row][pieces.mask], rtol=1e-12, atol=1e-12)


SPLIT = {
    "token_mean": use(losses.token_mean),
    "seq_mean_token_mean": use(losses.seq_mean_token_mean),
    "seq_mean_token_sum": use(losses.seq_mean_token_sum),
    "seq_mean_token_sum_norm": use(losses.seq_mean_token_sum_norm, length=7.0),
    "prompt_token_mean": use(losses.prompt_token_mean),
}


@pytest.mark.parametrize("kept_whole", [False, True])
@pytest.mark.parametrize("mean", SPLIT)
def test_cut_rollouts_in_micro_batches_are_the_step_of_whole_ones(mean: str, kept_whole: bool) -> None:
    """The rows of one rollout in different micro-batches, or with a loss of sequences together in one."""
    whole = make_batch(5)
    pieces, row = cut(whole, 5)
    policy_loss = losses.gspo if kept_whole else losses.clipped_surrogate
    algorithm = algorithms.grpo(kl_coef=0).replace(aggregation=SPLIT[mean], policy_loss=policy_loss)
    assert (algorithm.together is None) is not kept_whole
    x = whole.data["log_probs"].clone().requires_grad_()
    expected = algorithms.policy_objective(algorithm, {**without_counts(whole), "log_probs": x})
    (gradient,) = torch.autograd.grad(expected, x)

    data = {**without_counts(pieces), "trajectory_ids": row}
    counts = algorithms.step_counts(algorithm, data)
    generator = torch.Generator().manual_seed(0)
    part_of = torch.randint(3, row.shape, generator=generator)
    part_of = part_of[row] if kept_whole else part_of
    assert kept_whole or len(set(zip(row.tolist(), part_of.tolist(), strict=True))) > len(set(row.tolist()))
    value = torch.zeros((), dtype=torch.float64)
    for part in range(3):
        chosen = part_of == part
        micro: dict[str, Any] = {name: column[chosen] for name, column in (data | counts.columns).items()}
        micro |= {name: dense_ids(micro[name]) for name in ("group_ids", "trajectory_ids")} | counts.totals
        y = micro["log_probs"].clone().requires_grad_()
        loss = algorithms.policy_objective(algorithm, {**micro, "log_probs": y})
        (found,) = torch.autograd.grad(loss, y)
        value += loss.detach()
        inside = micro["response_mask"]
        torch.testing.assert_close(found[inside], gradient[row[chosen]][inside], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)


def without_counts(batch: Batch) -> dict[str, Tensor]:
    return {name: x for name, x in without_ids(batch).items() if not name.endswith("_tokens")}


class TestTrajectoryMean:
    """Rollouts of 2 and 1 rows with 3 + 1 and 2 tokens."""

    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    ids = torch.tensor([1, 0, 1])
    x = torch.tensor([[1.0, 2.0, 3.0], [8.0, torch.nan, torch.nan], [4.0, 6.0, torch.nan]])

    def test_by_hand(self) -> None:
        got = losses.trajectory_mean(self.x, self.ids, self.mask)
        assert got == pytest.approx(((1 + 2 + 3 + 4 + 6) / 5 + 8 / 1) / 2)
        assert losses.seq_mean_token_mean(self.x, self.mask) == pytest.approx((2 + 8 + 5) / 3)

    def test_slime_divides_each_sample_by_the_tokens_of_its_rollout(self) -> None:
        """slime: Σ loss / ``sample_denoms`` of each sample; samples of a rollout share one, made for the whole step."""
        sample_denoms = [5, 1, 5]
        by_hand = sum(float(x[m].sum()) / n for x, m, n in zip(self.x, self.mask, sample_denoms, strict=True)) / 2
        totals = losses.count_totals(self.mask, trajectory_ids=self.ids)
        parts = [
            losses.trajectory_mean(
                self.x[rows], self.ids[rows], self.mask[rows], totals=totals, trajectory_tokens=torch.tensor(tokens)
            )
            for rows, tokens in ((slice(0, 2), [5, 1]), (slice(2, 3), [5]))
        ]
        assert float(sum(parts)) == pytest.approx(by_hand)
        alone = [losses.trajectory_mean(self.x[i : i + 1], torch.tensor([0]), self.mask[i : i + 1]) for i in range(3)]
        assert float(sum(alone) / 2) != pytest.approx(by_hand)  # "a partial denominator"

    def test_of_single_rows_it_is_the_mean_over_sequences(self) -> None:
        got = losses.trajectory_mean(self.x, torch.arange(3), self.mask)
        assert torch.equal(got, losses.seq_mean_token_mean(self.x, self.mask))

    def test_a_spec_takes_the_mean_over_sequences_for_it(self) -> None:
        algorithm = algorithms.grpo(kl_coef=0)
        data = {"losses": self.x, "trajectory_ids": self.ids, "response_mask": self.mask}
        for mean in (algorithm.aggregation, use(losses.trajectory_mean)):
            torch.testing.assert_close(mean(data), losses.trajectory_mean(self.x, self.ids, self.mask))

    def test_a_rollout_without_a_token_does_not_count(self) -> None:
        mask = self.mask & torch.tensor([[True], [False], [True]])
        assert losses.trajectory_mean(self.x, self.ids, mask) == pytest.approx(16 / 5)

    def test_totals_that_count_no_rollouts(self) -> None:
        totals = losses.count_totals(self.mask)
        for mean in (losses.trajectory_mean, by_trajectory(losses.seq_mean_token_mean)):
            with pytest.raises(ValueError, match=r"totals.trajectories is None.*give trajectory_ids"):
                mean(losses=self.x, trajectory_ids=self.ids, response_mask=self.mask, totals=totals)


def test_two_rollouts_of_which_one_has_three_rows() -> None:
    """By rows GRPO would give 0.5, 0.5, 0.5, -1.5."""
    mask, ids = torch.ones(4, 2, dtype=torch.bool), torch.tensor([0, 0, 0, 1])
    data = {
        "scores": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "group_ids": torch.zeros(4, dtype=torch.int64),
        "response_mask": mask,
        "trajectory_ids": ids,
    }
    algorithm = algorithms.grpo(kl_coef=0.0)
    shaped = data | algorithms.shape_scores(algorithm, data)
    assert algorithms.filter_groups(algorithm, data) == [None] * 4
    estimated = algorithms.estimate_advantages(algorithm, shaped)
    assert estimated["advantages"][:, 0].tolist() == pytest.approx([0.70711] * 3 + [-0.70711], abs=1e-5)
    assert estimated["rewards"].sum() == 1  # once for the rollout, on its last token
    assert estimated["rewards"][2, 1] == 1


def test_a_sequence_loss_of_a_cut_rollout_by_a_spec() -> None:
    whole = make_batch(3)
    pieces, row = cut(whole, 3)
    algorithm = algorithms.gspo()
    expected = algorithms.policy_objective(algorithm, without_ids(whole))
    got = algorithms.policy_objective(algorithm, {**pieces.data, "trajectory_ids": row})
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_packed_rows_are_joined_as_padded_ones() -> None:
    whole = make_batch(4)
    pieces, row = cut(whole, 4)
    packed = pieces.replace(lengths=torch.full_like(row, pieces.mask.shape[1])).pack()
    got = by_trajectory(losses.gspo)(**arguments(losses.gspo, packed), trajectory_ids=row)
    expected = by_trajectory(losses.gspo)(**arguments(losses.gspo, pieces), trajectory_ids=row)
    torch.testing.assert_close(got, expected.flatten(), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "values"), [("group_ids", [0, 1, 1]), ("scores", [1.0, 0.0, 0.0])])
def test_a_rollout_has_one_group_and_one_score(name: str, values: list[Any]) -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    data = {"group_ids": torch.zeros(3, dtype=torch.int64), "scores": torch.zeros(3), "response_mask": mask}
    data[name] = torch.tensor(values)
    data["trajectory_ids"] = torch.tensor([0, 0, 1])
    algorithm = algorithms.grpo(kl_coef=0.0)
    with pytest.raises(ValueError, match=f"{name} of row 1 is"):
        algorithms.estimate_advantages(algorithm, data | {"shaped_scores": data["scores"]})


def test_ids_must_be_dense_and_one_per_row() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 2\)"):
        join_rows(torch.tensor([0, 5]), mask)
    with pytest.raises(ValueError, match="trajectory_ids has shape"):
        join_rows(torch.tensor([0]), mask)
