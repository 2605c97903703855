"""Every metric by hand; and for every one of them: parts merge to the whole, packed is padded, masked is absent."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import diagnostics
from rlprims.diagnostics import (
    best_at_k,
    dead_groups,
    divergences,
    explained_variance,
    fraction,
    length_correlation,
    log_perplexity,
    majority_at_k,
    mean_over_tokens,
    nonfinite,
    pass_at_k,
    ratio_stats,
    rejections,
    response_stats,
    sampler_mismatch,
    staleness,
    support_mass,
    token_max,
    weight_stats,
)
from rlprims.grouping import dense_ids
from rlprims.layout import pack
from rlprims.types import Correlation, EffectiveShare, ExplainedVariance, Max, Mean, Metric, Metrics, merge_metrics

MASK = torch.tensor([[True, True, True], [True, False, False]])
LOG_PROBS = torch.log(torch.tensor([[2.0, 1.0, 0.5], [2.0, 9.0, 9.0]]))
ADVANTAGES = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, 1.0]])
FULL = torch.ones(1, 2, dtype=torch.bool)

Batch = dict[str, Any]

METRICS: dict[str, Callable[[Batch], Metric | Metrics]] = {
    "best_at_k": lambda b: best_at_k(b["scores"], b["group_ids"], k=2),
    "dead_groups": lambda b: dead_groups(b["scores"], b["group_ids"]),
    "divergences": lambda b: divergences(b["new"], b["old"], b["mask"]),
    "explained_variance": lambda b: explained_variance(b["new"], b["old"], b["mask"]),
    "support_mass": lambda b: support_mass(b["new"], b["old"], b["mask"]),
    "length_correlation": lambda b: length_correlation(b["scores"], b["mask"], b["cu"]),
    "log_perplexity": lambda b: log_perplexity(b["old"], b["mask"], b["cu"]),
    "majority_at_k": lambda b: majority_at_k(b["scores"].long() - 1, b["scores"], b["group_ids"], k=2),
    "nonfinite": lambda b: nonfinite(b["new"].log(), b["mask"]),
    "pass_at_k": lambda b: pass_at_k(b["scores"] > 1, b["group_ids"], k=2),
    "ratio_stats": lambda b: ratio_stats(b["new"], b["old"], b["a"], b["mask"], clip_low=0.2, clip_high=0.3),
    "rejections": lambda b: rejections({"low": b["new"] > -0.5, "high": b["a"] < 1}, b["mask"], b["cu"]),
    "response_stats": lambda b: response_stats(b["scores"], b["mask"], b["cu"]),
    "sampler_mismatch": lambda b: sampler_mismatch(b["old"], b["new"], b["mask"], b["cu"]),
    "fraction": lambda b: fraction(b["scores"] > 1),
    "staleness": lambda b: staleness((3 * b["new"]).nan_to_num().long(), 50, b["mask"]),
    "token_max": lambda b: token_max(b["new"].abs(), b["mask"]),
    "mean_over_tokens": lambda b: mean_over_tokens(b["new"], b["mask"]),
    "weight_stats": lambda b: weight_stats(b["new"].exp(), b["mask"]),
}


OF_ROWS = {"best_at_k", "dead_groups", "length_correlation", "majority_at_k", "pass_at_k", "response_stats", "fraction"}


def test_no_public_metric_escapes_the_laws() -> None:
    assert set(METRICS) == set(diagnostics.__all__)


def random_batch(seed: int) -> Batch:
    """12 padded rows in four groups; NaN outside the mask; one row is empty."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.randint(1, 7, (12, 1), generator=generator)
    mask &= torch.rand(12, 6, generator=generator) < 0.8
    mask[5] = False
    noise = {name: torch.randn(12, 6, generator=generator, dtype=torch.float64) for name in ("new", "old", "a")}
    scores = torch.randint(0, 3, (12,), generator=generator).double()
    scores[:3] = 0.1
    group_ids = torch.arange(12) // 3
    return {k: v.where(mask, torch.nan) for k, v in noise.items()} | {
        "mask": mask,
        "scores": scores,
        "group_ids": group_ids,
        "cu": None,
    }


def rows_of(batch: Batch, rows: Tensor) -> Batch:
    part = {name: x[rows] for name, x in batch.items() if name != "cu"} | {"cu": None}
    return part | {"group_ids": dense_ids(part["group_ids"])}


def measured(name: str, batch: Batch) -> Metrics:
    metrics = METRICS[name](batch)
    return metrics if isinstance(metrics, dict) else {"": metrics}


def assert_same(got: Metrics, want: Metrics) -> None:
    assert set(got) == set(want)
    for name, metric in want.items():
        torch.testing.assert_close(got[name].value(), metric.value(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", METRICS)
class TestLaws:
    def test_parts_merge_to_the_whole(self, name: str, seed: int) -> None:
        batch = random_batch(seed)
        part_of = torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(seed))[batch["group_ids"]]
        parts = [measured(name, rows_of(batch, part_of == part)) for part in range(4)]  # the last is empty
        assert_same(merge_metrics(*parts), measured(name, batch))
        assert_same(merge_metrics(*reversed(parts)), measured(name, batch))

    def test_packed_is_padded(self, name: str, seed: int) -> None:
        batch = random_batch(seed)
        lengths = (batch["mask"] * torch.arange(1, 7)).amax(-1)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        packed = batch | {k: pack(batch[k], cu) for k in ("new", "old", "a", "mask")} | {"cu": cu}
        assert_same(measured(name, packed), measured(name, batch))

    @pytest.mark.parametrize("junk", [0.0, torch.inf, 1e38])
    def test_diagnostics_read_nothing_outside_the_mask(self, name: str, seed: int, junk: float) -> None:
        batch = random_batch(seed)
        filled = batch | {k: batch[k].where(batch["mask"], junk) for k in ("new", "old", "a")}
        for metric, want in zip(measured(name, filled).values(), measured(name, batch).values(), strict=True):
            assert torch.equal(metric.value(), want.value())
            assert metric.value().isfinite()

    def test_a_response_without_a_token_counts_where_rows_are_counted_alone(self, name: str, seed: int) -> None:
        batch = random_batch(seed)
        without = rows_of(batch, batch["mask"].any(-1))
        if name not in OF_ROWS:
            assert_same(measured(name, without), measured(name, batch))

    def test_metrics_carry_no_graph(self, name: str, seed: int) -> None:
        batch = random_batch(seed)
        for tensor in ("new", "old", "a", "scores"):
            batch[tensor].requires_grad_()
        assert not any(metric.value().requires_grad for metric in measured(name, batch).values())

    def test_of_nothing_they_are_zero(self, name: str, seed: int) -> None:
        batch = rows_of(random_batch(seed), torch.zeros(12, dtype=torch.bool))
        assert all(metric.value() == 0 for metric in measured(name, batch).values())
        narrow = batch | {k: batch[k][:, :0] for k in ("new", "old", "a", "mask")}
        assert all(metric.value() == 0 for metric in measured(name, narrow).values())


class TestPolicy:
    def test_the_update_by_hand(self) -> None:
        got = ratio_stats(LOG_PROBS, torch.zeros(2, 3), ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2)
        assert got["clip_fraction_high"].value() == 0.25  # ratio 2, A > 0
        assert got["outside_fraction_high"].value() == 0.25  # ratio 2, A < 0
        assert got["clip_fraction_low"].value() == 0.25  # ratio 1/2, A < 0
        assert got["outside_fraction_low"].value() == 0
        assert got["ratio_max"].value() == pytest.approx(2.0)
        log2 = math.log(2)
        assert got["approx_kl"].value() == pytest.approx((2 * (1 - log2) + 0 + (log2 - 0.5)) / 4)

    def test_each_side_and_sign_is_counted_apart(self) -> None:
        ratio = torch.tensor([[0.5] * 3 + [2.0] * 7])
        a = torch.tensor([[-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]])
        got = ratio_stats(ratio.log(), torch.zeros(1, 10), a, ratio > 0, clip_low=0.2, clip_high=0.2)
        shares = {name: round(float(metric.value()), 6) for name, metric in got.items() if "fraction" in name}
        assert shares == {
            "clip_fraction_low": 0.1,
            "clip_fraction_high": 0.3,
            "outside_fraction_low": 0.2,
            "outside_fraction_high": 0.4,
        }

    def test_without_bounds_there_is_no_clip_fraction(self) -> None:
        assert set(ratio_stats(LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)) == {"approx_kl", "ratio_max"}

    def test_on_policy_nothing_has_moved(self) -> None:
        got = ratio_stats(LOG_PROBS, LOG_PROBS, ADVANTAGES, MASK)
        assert got["approx_kl"].value() == 0
        assert got["ratio_max"].value() == 1

    def test_divergences(self) -> None:
        got = divergences(LOG_PROBS, torch.zeros(2, 3), MASK)  # d = ln 2, 0, −ln 2, ln 2
        log2 = math.log(2)
        assert got["kl_k1"].value() == pytest.approx(log2 / 4)
        assert got["kl_k2"].value() == pytest.approx(3 * log2**2 / 8)
        assert got["kl_k3"].value() == pytest.approx((2 * (log2 - 0.5) + (1 - log2)) / 4)


class TestWeights:
    def test_by_hand(self) -> None:
        got = weight_stats(torch.tensor([[3.0, 1.0, torch.nan]]), torch.tensor([[True, True, False]]))
        assert {name: float(metric.value()) for name, metric in got.items()} == pytest.approx(
            {"weight_mean": 2.0, "weight_max": 3.0, "weight_ess": 16 / 20, "weight_chi2": 4.0}
        )

    def test_equal_weights_leave_everything(self) -> None:
        got = weight_stats(torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool))
        assert got["weight_ess"].value() == 1

    def test_one_weight_above_all_others_gives_one(self) -> None:
        got = weight_stats(torch.tensor([1e8] + [1e-8] * 9), torch.ones(10, dtype=torch.bool))
        assert got["weight_ess"].value() == pytest.approx(0.1)

    def test_a_mismatch_is_seen_at_its_largest_token(self) -> None:
        rollout = LOG_PROBS.clone()
        rollout[0, 1] += 0.5
        rollout[1, 2] += 99.0
        got = sampler_mismatch(LOG_PROBS, rollout, MASK)
        assert got["mismatch_max"].value() == pytest.approx(0.5)
        assert got["mismatch_k1"].value() == pytest.approx(0.5 / 4)
        assert got["mismatch_k3"].value() == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 4)
        assert got["mismatch_probability"].value() == pytest.approx((math.exp(0.5) - 1) / 4)
        assert got["mismatch_chi2"].value() == pytest.approx((math.exp(-1) - 1) / 4)
        assert got["mismatch_chi2_sequence"].value() == pytest.approx((math.exp(-1) - 1) / 2)
        w = math.exp(-0.5)
        assert got["mismatch_ess"].value() == pytest.approx((3 + w) ** 2 / 4 / (3 + w**2))
        assert got["mismatch_ess_sequence"].value() == pytest.approx((1 + w) ** 2 / 2 / (1 + w**2))

    def test_of_a_response_the_ratios_multiply(self) -> None:
        rollout = torch.zeros(1, 2)
        got = sampler_mismatch(torch.full((1, 2), math.log(2)), rollout, FULL)
        assert got["mismatch_chi2"].value() == pytest.approx(3)
        assert got["mismatch_chi2_sequence"].value() == pytest.approx(15)


class TestResponses:
    def test_by_hand(self) -> None:
        got = response_stats(torch.tensor([1.0, 0.0]), MASK)
        assert got["score"].value() == 0.5
        assert got["length"].value() == 2
        assert got["length_score_correlation"].value() == pytest.approx(1)

    def test_the_correlation_is_numpys(self) -> None:
        mask = torch.arange(5) < torch.tensor([1, 5, 3, 2])[:, None]
        x = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
        want = torch.corrcoef(torch.stack([mask.sum(-1).double(), x]))[0, 1]
        torch.testing.assert_close(length_correlation(x, mask).value(), want)

    @pytest.mark.parametrize("score", [0.1, 1000.1])
    def test_equal_scores_go_with_nothing(self, score: float) -> None:
        mask = torch.arange(7) < torch.arange(1, 8)[:, None]
        assert length_correlation(torch.full((7,), score), mask).value() == 0

    def test_log_perplexity(self) -> None:
        got = log_perplexity(LOG_PROBS, MASK)  # ln 2 + 0 − ln 2; ln 2
        assert got.value() == pytest.approx(-math.log(2) / 2)

    def test_rejections_by_cause(self) -> None:
        bounds = torch.tensor([[True, False, True], [False, False, True]])
        veto = torch.tensor([[True, False, False], [True, True, True]])
        got = {name: float(m.value()) for name, m in rejections({"bounds": bounds, "veto": veto}, MASK).items()}
        assert got == {
            "rejected_bounds": 0.5,
            "rejected_veto": 0.5,
            "rejected": 0.75,  # one token has both causes
            "rejected_sequences": 0.5,
        }

    def test_nonfinite(self) -> None:
        x = torch.tensor([[1.0, torch.nan, -torch.inf], [0.0, torch.nan, torch.nan]])
        assert nonfinite(x, MASK).value() == 0.5


class TestCritic:
    @pytest.mark.parametrize(("values", "want"), [([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0)])
    def test_explained_variance(self, values: list[float], want: float) -> None:
        got = explained_variance(torch.tensor([values]), torch.tensor([[1.0, 3.0]]), FULL)
        assert got.value() == pytest.approx(want)

    def test_a_constant_critic_error_is_no_error_of_shape(self) -> None:
        assert explained_variance(torch.tensor([[11.0, 13.0]]), torch.tensor([[1.0, 3.0]]), FULL).value() == 1

    @pytest.mark.parametrize("constant", [5.0, 0.1, 1000.1])
    def test_a_constant_return_explains_nothing(self, constant: float) -> None:
        mask = torch.ones(1, 7, dtype=torch.bool)
        got = explained_variance(torch.arange(7.0)[None], torch.full((1, 7), constant), mask)
        assert got.value() == 0
        assert got.merge(got).merge(got).value() == 0


class TestGroups:
    def test_dead_groups(self) -> None:
        scores = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 5.0, 1.0, torch.nan])
        assert dead_groups(scores, torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])).value() == 0.75  # one of three, one NaN

    def test_a_wide_tolerance_kills_more(self) -> None:
        assert dead_groups(torch.tensor([0.0, 0.5]), torch.tensor([0, 0]), tolerance=1.0).value() == 1

    @pytest.mark.parametrize("k", range(1, 6))
    def test_best_at_k_is_the_mean_over_all_subsets(self, k: int) -> None:
        scores = torch.tensor([0.5, -1.0, 2.0, 0.5, 0.25])
        want = [max(subset) for subset in combinations(scores.tolist(), k)]
        got = best_at_k(scores, torch.zeros(5, dtype=torch.int64), k=k).value()
        assert got == pytest.approx(sum(want) / len(want), abs=1e-15)
        worst = [min(subset) for subset in combinations(scores.tolist(), k)]
        got = -best_at_k(-scores, torch.zeros(5, dtype=torch.int64), k=k).value()
        assert got == pytest.approx(sum(worst) / len(worst), abs=1e-15)

    @pytest.mark.parametrize("n", [1, 4, 32, 2000])
    def test_pass_at_k_is_the_equation_of_the_paper(self, n: int) -> None:
        for right in {0, 1, n // 2, n}:
            for k in {1, min(3, n), n}:
                correct = torch.arange(n) < right
                want = 1 - math.comb(n - right, k) / math.comb(n, k)  # in integers of any size
                got = pass_at_k(correct, torch.zeros(n, dtype=torch.int64), k=k).value()
                assert got == pytest.approx(want, abs=1e-12)

    def test_one_of_32_is_found_by_32(self) -> None:
        correct, ids = torch.arange(32) == 7, torch.zeros(32, dtype=torch.int64)
        assert pass_at_k(correct, ids, k=32).value() == pytest.approx(1)  # verl 0.9.1's best@32: 0.62
        assert pass_at_k(correct, ids, k=8).value() == pytest.approx(0.25)  # its best@8: 0.209

    def test_a_prompt_of_fewer_than_k_is_not_counted(self) -> None:
        got = pass_at_k(torch.tensor([True, False, False]), torch.tensor([0, 1, 1]), k=2)
        assert got.value() == 0
        assert got.count == 1

    def test_k_and_dtype_are_checked(self) -> None:
        ids = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(ValueError, match="k=0, expected at least 1"):
            best_at_k(torch.zeros(2), ids, k=0)
        with pytest.raises(ValueError, match=r"correct has dtype torch\.float32"):
            pass_at_k(torch.zeros(2), ids, k=1)


class TestMerging:
    def test_only_the_same_kind_merges(self) -> None:
        one, square = torch.ones(1), torch.ones(1, 1)
        kinds = [Mean(one, one), Max(one), *(kind(one, one, square) for kind in (Correlation, EffectiveShare))]
        for a in kinds:
            for b in kinds:
                if a is not b:
                    with pytest.raises(TypeError, match="to merge with"):
                        a.merge(b)

    def test_a_large_offset_takes_no_digits_away(self) -> None:
        """Sums of squares of these in float32 would have a variance of 0 or of 8."""
        r = torch.tensor([[10001.0, 10002.0, 10003.0, 10004.0]])
        v = torch.tensor([[10001.0, 10002.0, 10003.0, 10002.0]])
        mask = torch.ones(1, 2, dtype=torch.bool)
        parts = [explained_variance(v[:, i : i + 2], r[:, i : i + 2], mask) for i in (0, 2)]
        merged = parts[0].merge(parts[1])
        assert isinstance(merged, ExplainedVariance)
        assert merged.value() == pytest.approx(1 - 3 / 5)


@pytest.mark.parametrize("bounds", [{}, {"clip_low": 0.2, "clip_high": 0.3}, {"clip_low": 1.0, "clip_high": 0.3}])
@pytest.mark.parametrize("shape", [(5, 40), (2, 0), (1, 3)])
def test_the_compiled_metrics_are_the_same(shape: tuple[int, int], bounds: dict[str, Any]) -> None:
    torch._dynamo.reset()  # which gives up a function that is compiled eight times
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(shape, generator=generator) for _ in range(3))
    mask = torch.rand(shape, generator=generator) < 0.6
    new[~mask], advantages[~mask] = torch.nan, torch.inf
    new[:1, :2], old[:1, :2] = 50.0, -50.0  # beyond the limit of a log-ratio
    mask[:1, :1] = True

    def values(*tokens: Tensor) -> dict[str, Tensor]:
        return {name: metric.value() for name, metric in diagnostics.ratio_stats(*tokens, **bounds).items()}

    want = values(new, old, advantages, mask)
    got = torch.compile(values, fullgraph=True, backend="eager")(new, old, advantages, mask)
    assert got.keys() == want.keys()
    assert len(want) == (2 if not bounds else 6)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7)


class TestShapes:
    def test_a_mask_of_another_shape_is_refused(self) -> None:
        """A (2, 3) tensor with a (2, 1) mask was broadcast: the mean was 10.5 instead of an error."""
        x, narrow = torch.arange(6.0).reshape(2, 3), torch.ones(2, 1, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"x has shape \(2, 3\), response_mask has \(2, 1\)"):
            mean_over_tokens(x, narrow)

    def test_tokens_that_do_not_fit_are_refused_by_every_metric(self) -> None:
        x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
        short, row = torch.zeros(2, 1), torch.zeros(1, 3)
        calls: list[Callable[[], object]] = []
        for bad in (short, row):
            calls += [
                lambda bad=bad, fn=fn: fn(bad, mask) for fn in (mean_over_tokens, token_max, nonfinite, log_perplexity)
            ]
            calls += [lambda bad=bad: weight_stats(bad, mask)]
            for fn in (divergences, explained_variance, sampler_mismatch):
                calls += [lambda bad=bad, fn=fn: fn(bad, x, mask), lambda bad=bad, fn=fn: fn(x, bad, mask)]
            for place in range(3):
                tokens = [bad if i == place else x for i in range(3)]
                calls += [lambda tokens=tokens: ratio_stats(*tokens, mask)]
            calls += [lambda bad=bad: rejections({"bounds": bad > 0}, mask)]
        for call in calls:
            with pytest.raises(ValueError, match=r"has shape \((2, 1|1, 3)\)"):
                call()

    def test_rows_that_do_not_fit_are_refused_by_every_metric(self) -> None:
        ids, mask = torch.zeros(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
        for bad in (torch.zeros(1), torch.zeros(2, 1), torch.zeros(3)):
            calls = [
                lambda bad=bad: best_at_k(bad, ids, k=1),
                lambda bad=bad: pass_at_k(bad > 0, ids, k=1),
                lambda bad=bad: dead_groups(bad, ids),
                lambda bad=bad: response_stats(bad, mask),
                lambda bad=bad: length_correlation(bad, mask),
            ]
            for call in calls:
                with pytest.raises(ValueError, match=r"has shape .*expected"):
                    call()
        with pytest.raises(ValueError, match=r"rows has shape \(2, 1\).*expected bool \(B,\)"):
            fraction(torch.zeros(2, 1) > 0)

    def test_masks_that_are_not_bool_are_refused(self) -> None:
        x, mask = torch.zeros(2, 3), torch.ones(2, 3)
        calls: list[Callable[[], object]] = [
            *(
                lambda fn=fn: fn(x, mask)
                for fn in (mean_over_tokens, token_max, nonfinite, weight_stats, log_perplexity)
            ),
            *(lambda fn=fn: fn(x, x, mask) for fn in (divergences, explained_variance, sampler_mismatch)),
            lambda: ratio_stats(x, x, x, mask),
            lambda: rejections({"bounds": mask}, mask > 0),
            lambda: fraction(mask[0]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"dtype torch\.float32, expected (torch\.)?bool"):
                call()


class TestMismatch:
    def test_k1_is_a_plain_mean_of_the_differences(self) -> None:
        """It was clamped to ±20 without a word: one token that the sampler found far likelier was hidden."""
        got = sampler_mismatch(torch.tensor([[-101.0, -1.0]]), torch.full((1, 2), -1.0), FULL)
        assert got["mismatch_k1"].value() == 50
        assert got["mismatch_max"].value() == 20
        assert all(metric.value().isfinite() for metric in got.values())


class TestStaleness:
    def test_by_token_and_not_by_response(self) -> None:
        """A long fresh response and a short stale one: by token 4/10, by response 1."""
        versions = torch.tensor([[7] * 8, [5] * 2 + [0] * 6])
        mask = torch.arange(8) < torch.tensor([[8], [2]])
        got = staleness(versions, 7, mask)
        assert float(got["staleness"].value()) == pytest.approx(0.4)
        assert float(got["staleness_max"].value()) == 2
        assert float(got["stale_fraction"].value()) == pytest.approx(0.2)

    def test_a_version_of_the_future(self) -> None:
        with pytest.raises(ValueError, match="current_version=3, expected at least 4, the newest version"):
            staleness(torch.tensor([[4, 9]]), 3, torch.tensor([[True, False]]))
        with pytest.raises(ValueError, match=r"dtype torch\.float32, expected integers"):
            staleness(torch.zeros(1, 2), 3, FULL)
        with pytest.raises(ValueError, match="versions has shape"):
            staleness(torch.zeros(2, dtype=torch.int64), 3, FULL)
