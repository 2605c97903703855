"""Results depend neither on torch's default dtype nor on autocast: bit for bit, and in dtype."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import corrections, diagnostics, filters, rewards

B, T = 12, 40

Batch = dict[str, Tensor]


def batch(dtype: torch.dtype) -> Batch:
    """Always the same numbers; tokens that are not valid are NaN."""
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(B, T, generator=generator, dtype=torch.float64)
        for name in ("new", "old", "rollout", "ref", "a", "values", "returns")
    }
    mask = torch.rand(B, T, generator=generator, dtype=torch.float64) < 0.8
    mask[5] = False
    scores = torch.rand(B, generator=generator, dtype=torch.float64)
    return {
        **{name: torch.where(mask, x, torch.nan).to(dtype) for name, x in noise.items()},
        "mask": mask,
        "scores": scores.to(dtype),
        "components": torch.stack([scores, scores.flip(0), torch.where(scores < 0.2, torch.nan, scores)], 1).to(dtype),
        "solved": scores > 0.5,
        "ended": (scores > 0.5).to(torch.int8),
        "group_ids": torch.arange(B) // 4,
        "turn_ids": torch.arange(T).expand(B, T) // 9,
        "responses": torch.randint(0, 9, (B, T), generator=generator),
    }


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


CALLS: dict[str, Callable[[Batch], Any]] = {
    "filters.bapo": lambda b: filters.bapo(b["new"], b["old"], b["a"], b["mask"]),
    "filters.clip_cov": lambda b: filters.clip_cov(
        b["new"], b["a"], b["mask"], fraction=0.1, low=0.1, high=2.0, generator=generator()
    ),
    "filters.completed_groups": lambda b: filters.completed_groups(b["ended"], b["group_ids"], max_share=0.5),
    "filters.finite_scores": lambda b: filters.finite_scores(b["scores"], b["group_ids"]),
    "filters.finite_tokens": lambda b: filters.finite_tokens(b["rollout"], b["mask"]),
    "filters.high_entropy": lambda b: filters.high_entropy(b["new"], b["mask"], fraction=0.3),
    "filters.kl_cov": lambda b: filters.kl_cov(b["new"], b["a"], b["mask"], fraction=0.1),
    "filters.m2po": lambda b: filters.m2po(b["new"], b["rollout"], b["mask"], tau=0.5),
    "filters.max_variance": lambda b: filters.max_variance(b["scores"], b["group_ids"], keep=2),
    "filters.varied_scores": lambda b: filters.varied_scores(b["scores"], b["group_ids"]),
    "filters.policy_filtration": lambda b: filters.policy_filtration(
        b["scores"], b["group_ids"], over="group", generator=generator()
    ),
    "filters.solve_rate": lambda b: filters.solve_rate(b["scores"], b["group_ids"], low=0.4, high=0.6),
    "filters.varied_components": lambda b: filters.varied_components(b["components"], b["group_ids"]),
    "corrections.batch_normalized": lambda b: (
        corrections.batch_normalized(corrections.tis(b["old"], b["rollout"], b["mask"]), b["mask"]).values
    ),
    "corrections.fipo": lambda b: corrections.fipo(b["new"], b["old"], b["a"], b["mask"], half_life=3.0).values,
    "corrections.geometric_gate": lambda b: corrections.geometric_gate(b["old"], b["rollout"], b["mask"]).values,
    "corrections.icepop": lambda b: corrections.icepop(b["old"], b["rollout"], b["mask"]).values,
    "corrections.importance_weights": lambda b: (
        corrections.importance_weights(
            b["old"], b["rollout"], b["mask"], turn_ids=b["turn_ids"], level="segment", mean="geometric"
        ).values
    ),
    "corrections.mis": lambda b: corrections.mis(b["old"], b["rollout"], b["mask"]).values,
    "corrections.opsm": lambda b: corrections.opsm(b["new"], b["rollout"], b["a"], b["mask"], delta=0.1).values,
    "corrections.rejection": lambda b: corrections.rejection(b["old"], b["rollout"], b["mask"], high=0.8).values,
    "corrections.replace_nonfinite": lambda b: corrections.replace_nonfinite(b["rollout"], b["old"], b["mask"]),
    "corrections.seq_mask_tis": lambda b: corrections.seq_mask_tis(b["old"], b["rollout"], b["mask"]).values,
    "corrections.tis": lambda b: corrections.tis(b["old"], b["rollout"], b["mask"]).values,
    "corrections.token_veto": lambda b: corrections.token_veto(b["old"], b["rollout"], b["mask"], low=0.1).values,
    "diagnostics.best_at_k": lambda b: diagnostics.best_at_k(b["scores"], b["group_ids"], k=3),
    "diagnostics.dead_groups": lambda b: diagnostics.dead_groups(b["scores"], b["group_ids"], tolerance=0.7),
    "diagnostics.divergences": lambda b: diagnostics.divergences(b["new"], b["ref"], b["mask"]),
    "diagnostics.explained_variance": lambda b: diagnostics.explained_variance(b["values"], b["returns"], b["mask"]),
    "diagnostics.length_correlation": lambda b: diagnostics.length_correlation(b["scores"], b["mask"]),
    "diagnostics.log_perplexity": lambda b: diagnostics.log_perplexity(b["new"], b["mask"]),
    "diagnostics.majority_at_k": lambda b: diagnostics.majority_at_k(
        b["responses"][:, 0] - 1, b["scores"], b["group_ids"], k=3
    ),
    "diagnostics.nonfinite": lambda b: diagnostics.nonfinite(b["new"].log(), b["mask"]),
    "diagnostics.pass_at_k": lambda b: diagnostics.pass_at_k(b["solved"], b["group_ids"], k=2),
    "diagnostics.ratio_stats": lambda b: diagnostics.ratio_stats(
        b["new"], b["old"], b["a"], b["mask"], clip_low=0.2, clip_high=0.3
    ),
    "diagnostics.rejections": lambda b: diagnostics.rejections({"low": b["new"] > 0, "high": b["a"] < 1}, b["mask"]),
    "diagnostics.response_stats": lambda b: diagnostics.response_stats(b["scores"], b["mask"]),
    "diagnostics.support_mass": lambda b: diagnostics.support_mass(b["old"], b["rollout"], b["mask"]),
    "diagnostics.sampler_mismatch": lambda b: diagnostics.sampler_mismatch(b["old"], b["rollout"], b["mask"]),
    "diagnostics.fraction": lambda b: diagnostics.fraction(b["solved"]),
    "diagnostics.staleness": lambda b: diagnostics.staleness(b["turn_ids"], 99, b["mask"]),
    "diagnostics.token_max": lambda b: diagnostics.token_max(b["new"].abs(), b["mask"]),
    "diagnostics.mean_over_tokens": lambda b: diagnostics.mean_over_tokens(b["new"], b["mask"]),
    "diagnostics.weight_stats": lambda b: diagnostics.weight_stats(b["new"].exp(), b["mask"]),
    "rewards.at_last_token": lambda b: rewards.at_last_token(b["scores"], b["mask"]),
    "rewards.weighted_score": lambda b: rewards.weighted_score(b["components"], weights=(1.0, 0.1, 0.3)),
    "rewards.cosine_length": lambda b: rewards.cosine_length(b["scores"], b["mask"], max_length=30),
    "rewards.implicit_process": lambda b: rewards.implicit_process(b["new"], b["ref"], b["mask"]),
    "rewards.cost_per_token": lambda b: rewards.cost_per_token(
        b["scores"], b["group_ids"], b["mask"], context_lengths=b["responses"].sum(-1), turn_ids=b["turn_ids"]
    ),
    "rewards.kl_penalty": lambda b: rewards.kl_penalty(
        b["a"], b["old"], b["ref"], b["mask"], kl_coef=0.1, estimator="k3"
    ),
    "rewards.overlong_penalty": lambda b: rewards.overlong_penalty(b["mask"], max_length=35, buffer_length=9),
    "rewards.potential_shaping": lambda b: rewards.potential_shaping(b["values"], b["mask"], gamma=0.9),
    "rewards.relative_length": lambda b: rewards.relative_length(b["scores"], b["group_ids"], b["mask"]),
    "rewards.repetition_penalty": lambda b: rewards.repetition_penalty(b["responses"], b["mask"], ngram=2),
    "rewards.rescale": lambda b: rewards.rescale(b["scores"], shift=0.1, scale=3.0, high=1.0),
    "rewards.solve_rate_length": lambda b: rewards.solve_rate_length(
        b["scores"], b["group_ids"], b["mask"], max_length=T
    ),
    "rewards.truncation_penalty": lambda b: rewards.truncation_penalty(b["scores"], b["ended"], scale=0.3, penalty=0.1),
}


def test_no_function_escapes() -> None:
    packages = {"filters": filters, "corrections": corrections, "diagnostics": diagnostics, "rewards": rewards}
    public = {f"{name}.{fn}" for name, package in packages.items() for fn in package.__all__}
    without_tensors = {"filters.DifficultyPools", "filters.DynamicSampling", "filters.SamplingExhausted"}
    assert set(CALLS) == public - without_tensors - {"corrections.Weights", "rewards.verifiers"}


def tensors(result: Any) -> list[Tensor]:
    """Of a metric its number, and the parts that merge to it."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        return [x for metric in result.values() for x in tensors(metric)]
    return [result.value(), *(x for x in vars(result).values() if isinstance(x, Tensor))]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_surroundings_change_nothing(name: str, dtype: torch.dtype, surrounding: str) -> None:
    """high_entropy, kl_cov and repetition_penalty counted in the default dtype; moments were products in bf16."""
    data = batch(dtype)
    want = tensors(CALLS[name](data))
    with SURROUNDINGS[surrounding]():
        got = tensors(CALLS[name](data))
    assert len(got) == len(want) > 0
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)  # dtypes too
        assert x.dtype is not torch.bfloat16
