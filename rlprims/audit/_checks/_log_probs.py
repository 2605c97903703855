"""L: log-probs of trainer, sampler and reference; d is the trainer's less the sampler's. K: the reference."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rlprims.audit._checks._step import Checks, Said, Step, correlation, need
from rlprims.ratios import estimate_kl

_COLUMNS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")


def _weights(d: Tensor) -> dict[str, Any]:
    """Of w = exp(d): that of the mean d, as a change; and the effective share of the tokens, (Σ w)² / (n Σ w²)."""
    w = d.clamp(-20, 20).exp()
    return {"bias": float(d.mean().expm1()), "effective": float(w.sum() ** 2 / (len(w) * w.square().sum()))}


def temperature(step: Step) -> Said:
    d, sampler = step.gap[step.scored], step["rollout_log_probs"][step.scored].double()
    r = correlation(d, sampler)
    slope = r * float(d.std() / sampler.std().clamp(min=1e-12))
    return abs(r) > 0.5 and abs(slope) > 0.02, {"slope": 1 + slope, **_weights(d)}


def truncation(step: Step) -> Said:
    d = step.gap[step.scored]
    one_sided = d.clamp(min=0).sum() < 0.15 * d.clamp(max=0).sum().abs()
    return bool(one_sided & (d.mean() < -0.003)), {"below": float((d <= 0).double().mean()), **_weights(d)}


def _ages(step: Step) -> Tensor:
    version = step["versions" if "versions" in step else "weights_version"].double()
    if version.dim() == 2:
        version = (version * step.mask).sum(1) / step.mask.sum(1).clamp(min=1)
    return torch.where(step.rows, version[step.rows].max() - version, 0.0)


def stale(step: Step) -> Said:
    age, weights = _ages(step), _weights(step.gap[step.scored])
    where, numbers = step.grows(age, age == age.max())
    return where, {"note": weights["effective"] > 0.8 or "loss_weights" in step, **numbers, **weights}


def noise(step: Step) -> Said:
    need(not {"versions", "weights_version"} & step.keys() or not _ages(step).any(), "rows of one version")
    size = float(step.gap[step.scored].square().mean().sqrt())
    return size > 0.05, {"size": size, **_weights(step.gap[step.scored])}


def shifted(step: Step) -> Said:
    both = step.mask[:, 1:] & step.mask[:, :-1]
    need(both.sum() >= 64, "64 learned tokens")
    for other in [name for name in _COLUMNS if name in step and name != step.trainer] or ["rollout_log_probs"]:
        a, b = step.per_token(step.trainer), step.per_token(other)
        aligned = correlation(a[:, 1:][both], b[:, 1:][both])
        moved = max(correlation(a[:, 1:][both], b[:, :-1][both]), correlation(a[:, :-1][both], b[:, 1:][both]))
        z = torch.tensor([min(moved, 0.9999), -aligned]).atanh().sum() * (both.sum() / 2) ** 0.5
        if moved - aligned > 0.3 and z > 8:
            return True, {"one": step.trainer, "other": other, "aligned": aligned, "moved": moved}
    return False


def first_token(step: Step) -> Said:
    first = (step.mask.cumsum(1) == 1) & step.mask & (step.gap != 0)
    need(first.sum() >= 12 and (step.mask & ~first).any(), "12 rows")
    a, b = (float(step.gap.abs()[where].median()) for where in (first, step.mask & ~first))
    return first & (step.gap.abs() >= a) & (a > 0.1) & (a > 5 * b), {"first": a, "rest": b}


def padded(step: Step) -> Said:
    before = (step.read.cumsum(1) == 0).sum(1)
    return step.grows(before.double().log1p(), before == before.max())


def off_policy(step: Step) -> Said:
    need(not step["updates_before"].any(), "updates_before = 0")
    now, old = step.tokens("log_probs", "old_log_probs")
    return bool((now - old).square().mean().sqrt() > 0.01), {"size": float((now - old).square().mean().sqrt())}


def entropy(step: Step) -> Tensor:
    x = step.per_token("entropies")
    kept = step.per_token("kept_counts") if "kept_counts" in step else torch.zeros_like(x)
    return step.mask & ((x > torch.where(kept > 0, kept.log(), torch.inf) + 1e-3) | (x < -1e-3))


def unrelated(step: Step) -> Said:
    for other in [name for name in _COLUMNS[:3] if name in step and name != step.trainer] or ["rollout_log_probs"]:
        a, b = step.tokens(step.trainer, other)
        a, b = a[(a != 0) & (b != 0)], b[(a != 0) & (b != 0)]  # scored by both
        if len(a) >= 64 and (r := correlation(a, b)) < 0.5 and a.std() * b.std() > 0:
            return True, {"one": step.trainer, "other": other, "r": r, **_weights(a - b)}
    return False


def sign(step: Step) -> Said:
    if "kl" not in step:
        terms = [x for x in step.objective["loss"].parts.get("loss_terms", ()) if x.loss.fn.__name__ == "kl"]
        low = min([x.coefficient for x in terms], default=0.0)
        return low < 0, {"kl": "minus a KL", "value": low}
    kl, policy, ref = step.tokens("kl", step.trainer, "ref_log_probs")
    d, k3 = policy - ref, estimate_kl(policy - ref, "k3")
    wrong = {"-k1": -d, "-k2": -d.square() / 2, "-k3": -k3, "k3 of (ref, policy)": estimate_kl(-d, "k3")}
    apart = {name: float((kl - x).abs().max() / kl.abs().max().clamp(min=1e-12)) for name, x in wrong.items()}
    name = min(apart, key=lambda each: apart[each])
    return apart[name] < 1e-3, {"kl": name, "value": float(kl.mean())}


def _equal(step: Step, one: str, other: str) -> bool:
    return torch.equal(*step.tokens(one, other))


LOG_PROBS: Checks = {
    **{"L1": temperature, "L2": truncation, "L3": stale, "L4": noise, "L5": shifted, "L6": first_token, "L7": padded},
    "L8": lambda step: step.grows(step["pack_position"] > 0, step["pack_position"] > 0),
    "L10": lambda step: reduce(
        torch.logical_or, (step.per_token(x) > 1e-3 for x in _COLUMNS if x in {*step, step.trainer})
    ),
    "L12": lambda step: bool(step["updates_before"].any()) and _equal(step, "log_probs", "old_log_probs"),
    **{"L9": off_policy, "L11": entropy, "L13": unrelated, "K1": sign},
    "K2": lambda step: _equal(step, "log_probs", "ref_log_probs") and not _equal(step, "log_probs", "old_log_probs"),
}
