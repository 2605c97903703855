"""Where a step of the local trainer goes: seconds by stage, and of each the products, the attention and the rest."""

from collections.abc import Callable, Mapping
from statistics import median
from time import process_time
from typing import Any

from torch.profiler import ProfilerActivity, profile

STAGES = {"generate": "generate", "log_probs": "reference log-probs", "update": "update"}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
_ATTENTION = "aten::_scaled_dot_product"

Shares = dict[str, dict[str, float]]


def timed(execution: Any) -> dict[str, list[float]]:
    """CPU seconds of each call of each stage, from now on."""
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def wrapped(stage: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = process_time()
            try:
                return verb(*args, **kwargs)
            finally:
                seconds[stage].append(process_time() - began)

        return call

    for stage in STAGES:
        setattr(execution, stage, wrapped(stage, getattr(execution, stage)))
    return seconds


def shares(step: Callable[[], Any]) -> Shares:
    """Of each stage of one step: what part of it products of matrices took, and attention, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        step()
    events = list(watched.events() or [])
    found: Shares = {}
    for stage in STAGES:
        spans = [event.time_range for event in events if event.name == f"LocalExecution.{stage}"]
        taken = {"products": 0.0, "attention": 0.0, "all": 0.0}
        for event in events:
            if not any(span.start <= event.time_range.start < span.end for span in spans):
                continue
            taken["all"] += event.self_cpu_time_total
            if event.name in _PRODUCTS:
                taken["products"] += event.self_cpu_time_total
            elif event.name.startswith(_ATTENTION):
                taken["attention"] += event.self_cpu_time_total
        found[stage] = {kind: taken[kind] / max(taken["all"], 1e-9) for kind in ("products", "attention")}
    return found


def per_step(seconds: Mapping[str, list[float]], steps: int) -> dict[str, float]:
    """The median step's CPU seconds by stage; a stage has as many calls in each step."""
    found = {}
    for stage, calls in seconds.items():
        each = len(calls) // steps
        found[stage] = median(sum(calls[i * each : (i + 1) * each]) for i in range(steps))
    return found


def table(results: Mapping[str, Any]) -> str:
    """A line for each stage of each setting that has them."""
    lines = ["| setting | stage | CPU s | products | attention | the rest |", "|---|---|---:|---:|---:|---:|"]
    for name, r in results.items():
        if "stages" not in r:
            continue
        of_step = {"products": 0.0, "attention": 0.0}
        for stage, label in STAGES.items():
            seconds = r["stages"]["seconds"][stage]
            parts = {kind: seconds * share for kind, share in r["stages"]["shares"][stage].items()}
            if seconds:
                lines.append(f"| {name} | {label} | {_row(seconds, parts)} |")
            of_step = {kind: of_step[kind] + part for kind, part in parts.items()}
        lines.append(f"| {name} | the step | {_row(r['seconds']['rlprims'], of_step)} |")
    return "\n".join(lines)


def limits(results: Mapping[str, Any], targets: Mapping[str, float]) -> str:
    """Beside each target what was reached, and what of it no change around products and attention can save."""
    lines = []
    for name, target in targets.items():
        r = results.get(name, {})
        if "stages" in r:
            stages = r["stages"]
            fixed = sum(stages["seconds"][stage] * sum(part.values()) for stage, part in stages["shares"].items())
            lines.append(
                f"**{name}**: the target, {target:g} times TRL, is a step of {r['seconds']['trl'] / target:.2f} s; "
                f"ours takes {r['seconds']['rlprims']:.2f} s ({r['ratio']:.2f} times), {fixed:.2f} s of it in products "
                "and attention alone."
            )
    return "\n\n".join(lines)


def _row(seconds: float, parts: Mapping[str, float]) -> str:
    rest = seconds - sum(parts.values())
    return f"{seconds:.2f} | {parts['products']:.2f} | {parts['attention']:.2f} | {rest:.2f}"
