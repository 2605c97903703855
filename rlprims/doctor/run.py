"""Why a run ended badly: checks that read its files alone. A check's docstring is what a user reads: fault; remedy."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from rlprims.algorithms import objective_parts, parse, token_weights
from rlprims.grouping import dense_ids
from rlprims.reports.curves import read_metrics
from rlprims.runs.config import read_yaml
from rlprims.runs.directory import RunDirectory
from rlprims.runs.records import RecordedRow, by_group, read_rollouts, recorded_steps

Points: TypeAlias = list[tuple[int, float]]  # a value for each of some steps
Found: TypeAlias = tuple[int, str] | None  # since which step, and the numbers that show it
_TREND, _FEW = 20, 3  # a curve of fewer steps is mostly noise; one or two steps in a row are chance


class RunFiles(NamedTuple):
    """Settings as plain values, metrics, recorded steps; and the checks, each a function of them. No model is read."""

    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    records: dict[int, list[RecordedRow]]

    @classmethod
    def read(cls, path: Path) -> "RunFiles":
        config, metrics = read_yaml(RunDirectory.open(path).path / "config.yaml"), read_metrics(path)
        if not any(line["kind"] == "train" for line in metrics):
            raise ValueError(f"{path} has no step in metrics.jsonl: what ended it stands in its terminal")
        steps = list(recorded_steps(path)) if any((path / "rollouts").glob("step_*")) else []
        steps = steps[:: len(steps) // 16 or 1]  # at equal distances: a long run has gigabytes of them
        return cls(config, metrics, {step: read_rollouts(path, step) for step in steps})

    def series(self, name: str, kind: str = "train", *, at_least: int = 1, **only: float) -> Points:
        """A metric of the steps whose other metrics are ``only``; an error if they are too few."""
        lines = [line for line in self.metrics if line["kind"] == kind and line.get(name) is not None]
        points = [(line["step"], float(line[name])) for line in lines if only.items() <= line.items()]
        if len(points) < at_least:
            raise ValueError(f"{len(points)} lines with {name}, and it needs {at_least}" if points else f"no {name}")
        return points

    def trend(self, name: str) -> Points:
        """A metric as means over a tenth of the steps."""
        points = self.series(name, at_least=_TREND)
        n = len(points) // 10
        return [(at, fmean(x for _, x in points[max(0, i - n + 1) : i + 1])) for i, (at, _) in enumerate(points)]

    def rows(self) -> list[RecordedRow]:
        if not self.records:
            raise ValueError("no recorded rollouts")
        return [row for rows in self.records.values() for row in rows]

    def is_solved(self) -> bool:  # then entropy falls, and groups have one score, without a fault
        best = max((row.score or 0.0 for rows in self.records.values() for row in rows), default=1.0)
        return fmean(x for _, x in self.series("score")[-_FEW:]) >= 0.9 * best

    def batches(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The batches whose objective the records give, (B, T): before the first update the policy is the old one."""
        a = parse(self.config["algorithm"])
        for step, recorded in self.records.items():
            rows = [row for row in recorded if row.status == "trained"]
            own = [torch.tensor([not read for read in row.observed] or [True] * len(row.log_probs)) for row in rows]
            data = {"response_mask": pad_sequence(own, batch_first=True), "group_ids": dense_ids(r.group for r in rows)}
            for name in ("advantages", "log_probs", "old_log_probs"):  # tokens that were read have no advantage
                values = [[x or 0.0 for x in getattr(row, name) or row.log_probs] for row in rows]
                data[name] = pad_sequence([torch.tensor(x, dtype=torch.float64) for x in values], batch_first=True)
            data |= {"rollout_log_probs": data["log_probs"], "log_probs": data["old_log_probs"]}
            data |= {"trajectory_ids": dense_ids(row.sample_id for row in rows)} if rows[0].turn_ids else {}
            if step == 1 and self.config["model"]["reference"] is None:  # it begins as the policy
                data["ref_log_probs"] = data["old_log_probs"]
            if a.loss_needs | a.token_weight_needs <= data.keys():
                yield step, data | token_weights(a, data, generator=torch.Generator())

    def learning_rate(self) -> Found:
        """The learning rate is 0, so nothing is learned; optimizer.lr, and steps as many as the schedule has."""
        points, least = self.series("lr"), 1e-9  # AdamW's update: float32 loses it beside a weight of 0.02
        step = _since(points, lambda x: x < least) if median(x for _, x in points) < least else None  # it may end at 0
        return (step, f"lr {points[-1][1]:.2g}") if step else None

    def verifier(self) -> Found:
        """All responses have one score, or most have none; verifier, or data.answer, or sampling.max_new_tokens."""
        rows, _ = self.rows(), self.series("groups_sampled", at_least=_FEW)
        fails = sum(row.score is None for row in rows) > len(rows) / 2 or len({row.score for row in rows}) == 1
        if not fails or not parse(self.config["algorithm"]).advantage.needs & {"rewards", "component_scores"}:
            return None  # an advantage by a teacher reads no score
        has = sum(bool(row.answer) and row.answer in row.response for row in rows)
        return min(self.records), f"{rows[-1].score} in {len(rows)} responses, of which {has} have the answer in them"

    def dead_groups(self) -> Found:
        """Groups have one score, so no advantage; algorithm.group_size larger, or data.pools, or other questions."""
        a, points = parse(self.config["algorithm"]), [(at, 1 - x) for at, x in self.series("filter_yield")]
        if not a.filter and "group_ids" in a.advantage.needs:
            sets = {at: [{(r.score, r.shaped_score) for r in g} for g in by_group(x)] for at, x in self.records.items()}
            points = [(at, fmean(len(scores) == 1 for scores in each)) for at, each in sets.items()]
        step = _since(points, lambda x: x > 0.8)  # fewer than one group in five teaches
        if step is None or step > points[-_FEW:][0][0] or self.is_solved() or self.verifier():
            return None
        return step, f"{points[-1][1]:.0%} of the groups of the last step"

    def stale_weights(self) -> Found:
        """The sampler keeps old weights or an old adapter; model.lora.sync: merged, or ray.engine: hf to compare."""
        if self.config["replay"]:
            raise ValueError("a replay was sampled by other weights")
        gaps = [(at, (2 * max(0.0, k3)) ** 0.5) for at, k3 in self.series("mismatch_k3", staleness_max=0.0)]  # about x
        first = gaps[0][1]  # rounding, by which the bound of a run's first step is 2e-3 in float32
        (begin, x), *_ = [(at, x) for at, x in gaps if x > max(2e-3, 10 * first)] or [(0, 0.0)]
        return (begin, f"trainer and sampler differ by {first:.1g} nats, then by {x:.2g}") if begin else None

    def truncation(self) -> Found:
        """The sampler cuts tokens off, and the trainer scores the whole vocabulary; top_k: 0, top_p: 1, min_p: 0."""
        sampling, updates = self.config["sampling"], [line for line in self.metrics if "entropy" in line]
        if sampling["top_k"] == 0 and sampling["top_p"] == 1 and sampling["min_p"] == 0:
            return None
        if self.config["model"]["fused_head"]:
            raise ValueError("model.fused_head measures no support_mass")
        lost = [line["step"] for line in updates if line.get("outside_support") or "support_mass" not in line]
        return (lost[0], "no support_mass, or outside_support") if lost else None

    def sequence_weights(self) -> Found:
        """Corrections vanish, mostly products over long responses; importance_weights, mean: geometric, or tis."""
        a = parse(self.config["algorithm"])
        if not a.corrections:
            return None
        means = [(at, float(x["loss_weights"][x["response_mask"]].mean())) for at, x in self.batches()]
        if not means or a.token_selection is not None:
            raise ValueError("no records of all that the corrections read")
        low = [(at, x) for at, x in means if x < 0.5]  # a ratio has the mean 1: the gradient is below half its size
        return (low[0][0], f"mean weight {low[0][1]:.2g}") if low else None

    def denominators(self) -> Found:
        """The loss is not the mean of the config over the step; give every micro-batch the totals of step_counts."""
        a, losses, gaps = parse(self.config["algorithm"]), dict(self.series("loss")), list[float]()
        moves = a.updates_per_batch > 1 or a.ended.reasons("mask_turn") or self.config["model"]["router_aux_loss_coef"]
        for step, data in () if moves else self.batches():
            parts = [(part, part.losses(data)) for part in objective_parts(a)]
            own, size = (sum(float(part.mean(data, f(x))) for part, x in parts) for f in (torch.clone, torch.abs))
            gaps += [abs(losses[step] - own) / size] if size > 1e-6 and step in losses else []
        if not gaps:
            raise ValueError("no records of all that the loss reads before an update")
        off = median(gaps)  # 1e-8 by rounding, if log-probs and update have other micro-batches less than a percent
        return (min(self.records), f"loss is off by {off:.0%} of its size") if off > 0.02 else None

    def template(self) -> Found:
        """The chat template has changed; data.template_arguments, {chat_template: ...}, fixes the one of the start."""
        seen, first = set[tuple[int, ...]](), self.rows()[0].prompt
        for step, rows in self.records.items() if self.config["data"]["template"] == "chat" else ():
            now = {tuple(row.prompt_ids) for row in rows}
            for part in (slice(0, 3), slice(-3, None)):  # more tokens than these may be the question's
                old, new = {ids[part] for ids in seen}, {ids[part] for ids in now}
                if len(seen) >= 8 and len(old) == 1 and not old & new:  # fewer prompts may end alike by chance
                    return step, f"prompts like {first[-40:]!r} are now like {rows[0].prompt[-40:]!r}"
            seen |= now
        return None

    def length_hacking(self) -> Found:
        """Length scores, and accuracy does not follow; score_shaping: overlong_penalty, or the verifier's parts."""
        lengths, (_, link) = self.trend("length"), _ends(self.trend("length_score_correlation"))
        begin, end = _ends(lengths)
        (_, before), *_, (_, after) = self.series("sampled/acc", "eval", at_least=2)
        step = _since(lengths, lambda x: not 2 / 3 < x / max(begin, 1) < 3 / 2)  # beyond the noise of a step's mean
        if step is None or link * (end - begin) <= 0 or abs(link) < 0.3 or after > before + 0.02:
            return None
        return step, f"length {begin:.3g} to {end:.3g}, correlation {link:.2f}, sampled/acc {before:.2f} to {after:.2f}"

    def entropy_collapse(self) -> Found:
        """A tenth of the first entropy is left, the score stands still; clip_high larger, or optimizer.lr smaller."""
        points, scores = self.trend("entropy"), [x for _, x in self.series("score", at_least=8)]
        n, begin = len(scores) // 4, _ends(points)[0]
        rises = fmean(scores[-n:]) > fmean(scores[-2 * n : -n]) + stdev(scores[-2 * n :]) / n**0.5
        step = _since(points, lambda x: x < begin / 10)
        return None if step is None or rises or self.is_solved() else (step, f"{begin:.2g} to {points[-1][1]:.2g} nats")

    def critic(self) -> Found:
        """The critic explains nothing; critic.optimizer.lr larger, or critic.warmup_steps."""
        late = self.series("explained_variance", at_least=_TREND)[_TREND // 2 :]
        middle = median(x for _, x in late)  # of one number everywhere it is 0
        return (late[0][0], f"explained_variance {middle:.2g}") if middle < 0.005 and not self.is_solved() else None

    def kl_grows(self) -> Found:
        """The policy leaves its reference, or the old policy in a step; kl_coef larger, or optimizer.lr smaller."""
        name = "ref_kl" if any("ref_kl" in line for line in self.metrics) else "approx_kl"
        points = self.trend(name)
        # It surprises the reference more than two of its own samples do; or ten times where PPO stops its epochs.
        limit = _ends(self.trend("entropy"))[0] if name == "ref_kl" else 0.1
        step = _since(points, lambda x: x > limit)
        return (step, f"{name} {points[0][1]:.1g} to {points[-1][1]:.2g}, above {limit:.2g} nats") if step else None


def _since(points: Points, is_bad: Callable[[float], bool]) -> int | None:
    """The first step of those at the end that are all bad; None if the last is not."""
    begin = max((i for i, (_, x) in enumerate(points, 1) if not is_bad(x)), default=0)
    return points[begin][0] if begin < len(points) else None


def _ends(points: Points) -> tuple[float, float]:
    """The means of the first and of the last fifth."""
    n = max(1, len(points) // 5)
    return fmean(x for _, x in points[:n]), fmean(x for _, x in points[-n:])


CHECKS = ("learning-rate", "verifier", "dead-groups", "stale-weights", "truncation", "denominators", "sequence-weights",
          "template", "length-hacking", "entropy-collapse", "critic", "kl-grows")  # fmt: skip
MILD = ("critic", "dead-groups", "kl-grows")  # they slow a run down; the others leave nothing of it


def diagnose(run: RunFiles) -> Iterator[tuple[str, str, str, str]]:
    """For each check: mark, code, what was found, and what to write."""
    for code in CHECKS:
        check = getattr(run, code.replace("-", "_"))
        fault, remedy = (check.__doc__ or "; ").split("; ", 1)
        try:
            step, numbers = check() or (0, "")
            text = f"{fault}: {numbers}, since step {step}" if numbers else ""
            yield ("slow" if code in MILD else "no", code, text, remedy) if text else ("ok", code, "", "")
        except (ValueError, KeyError) as error:
            yield "–", code, f"not tried: {'no setting ' * isinstance(error, KeyError)}{str(error).splitlines()[0]}", ""
