"""M: which tokens are learned. G: groups. A: advantages. R: rewards. N: denominators, and numbers of no formula."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlprims.audit._checks._step import Checks, Said, Step, correlation, need
from rlprims.ended import Ended
from rlprims.grouping import dense_ids, first_rows, group_centred, group_count, is_constant
from rlprims.layout import last_token


def shifted(step: Step) -> Said:
    wide = {"prompts", "attention_mask", "input_ids"} <= step.keys()
    known = step.attended & ~step.of_prompt if wide else step.sampled
    moved = {"late": pad(known, (1, 0))[:, :-1], "early": pad(known, (0, 1))[:, 1:]}
    alike = {by: ((step.mask == x).double().mean(1)[step.rows] >= 0.98).double().mean() for by, x in moved.items()}
    by = max(alike, key=lambda each: float(alike[each]))
    return step.mask & ~known & (alike[by] >= 0.9), {"by": by}


def two_begins(step: Step) -> bool:
    first = step.read.long().argmax(1, keepdim=True)
    begin, then = step["input_ids"].gather(1, torch.cat([first, first + 1], 1).clamp(max=step.read.shape[1] - 1)).T
    known = getattr(step.tokenizer, "bos_token_id", None)
    need(known is not None or (step.prompts != step.prompts[0]).any(), "two prompts that differ, or a tokenizer")
    return bool(((begin == then) & (begin == (begin[0] if known is None else known))).all())


def _begins(step: Step) -> Tensor:
    """bool (B,): the first row of each rollout; later ones have longer prompts."""
    ids = step["trajectory_ids"] if "trajectory_ids" in step else torch.arange(len(step.mask))
    return first_rows(ids)[ids] == torch.arange(len(ids))


def _same(ids: Tensor) -> Tensor:
    return dense_ids(map(tuple, ids.tolist()))


def mixed(step: Step) -> Tensor:
    ids, begins = step["group_ids"], _begins(step)
    first = first_rows(ids, begins)[ids].clamp(max=len(ids) - 1)
    return begins & (step.prompts != step.prompts[first]).any(1)


def sizes(step: Step) -> Said:
    count = torch.bincount(step["group_ids"][_begins(step)])
    usual = int(count.mode().values)
    return (count != usual)[step["group_ids"]], {"odd": int((count != usual).sum()), "usual": usual}


def copies(step: Step) -> Tensor:
    log_p = step.per_token("rollout_log_probs" if "rollout_log_probs" in step else step.trainer).sum(1)
    answers = _same(step["ids"].masked_fill(~step.mask, -1))
    again = first_rows(answers)[answers] < torch.arange(len(answers))
    return again & (log_p + 2 * torch.tensor(len(log_p)).log() < -13.8) & step.rows  # p x B² < 10⁻⁶


def sums(step: Step) -> Said:
    where, a = step.varied & (step.off_zero > 1e-3), step.per_token("advantages")
    numbers = {"note": a.sum().abs() < 1e-3 * a.abs().sum(), "size": float(step.off_zero[step.varied].mean())}
    return where & (not step.estimator.parts), {**numbers, "estimator": step.estimator.said}


def other_statistics(step: Step) -> Said:
    text = step.estimator.said
    numbers = {"note": "over all rows," in text, "estimator": text, "size": float(step.off_zero.mean())}
    return text.endswith("not the group"), numbers


def wrong_rows(step: Step) -> Said:
    rows, ids = step.varied, step["group_ids"]
    need(rows.sum() >= 12, "12 rows in groups whose outcomes differ")
    scores, a = group_centred(step.outcomes, ids), group_centred(step.row_advantages, ids)
    r = correlation(scores[rows], a[rows])
    return rows & (scores * a < 0) & (r < 0.4) & (not step.estimator.parts), {"r": r}


def of_constant(step: Step) -> Tensor:
    need(step.varied.any() and (step.off_zero[step.varied] <= 1e-3).all(), "groups whose advantages add up to 0")
    where = is_constant(step.outcomes, step["group_ids"]) & (group_count(step["group_ids"]) > 1) & step.rows
    return where & (step.row_advantages.abs() > 1e-6) & (not step.estimator.parts)


def place(step: Step) -> Tensor:
    given = (step["rewards"] != 0) & step.rows[:, None]
    need(given.shape == step.mask.shape and (given.sum(1) <= 1).all(), "rewards (B, T), one per row")
    return given & ~last_token(step.mask)


def not_finite(step: Step) -> Said:
    shapes = {step.mask.shape: step.mask, step.mask.shape[:1]: step.rows}
    for name, x in step.items():
        if x.is_floating_point() and x.shape in shapes and (where := ~x.isfinite() & shapes[x.shape]).any():
            return where, {"name": name}
    return False


def denominator(step: Step) -> Said:
    text = step.objective["mean"].said if "mean" in step.objective else ""
    ids = step["ranks" if "rank" in text or "micro_batches" not in step else "micro_batches"].long()
    tokens = torch.bincount(ids, step.mask.sum(1).double())
    return " of each " in text, {"mean": text, "times": float(tokens.max() / tokens[tokens > 0].min())}


def factor(step: Step) -> Said:
    found = step.objective["loss"]
    x = float(found.parts.get("policy_coefficient", 1.0))
    n = max(abs(x), 1 / max(abs(x), 1e-30))
    return x != 1, {"note": abs(n - round(n)) > 1e-3 * n, "loss": found.said, "factor": x}


BATCH: Checks = {
    **{"M1": shifted, "M2": lambda step: step.mask & step.of_prompt},
    "M3": lambda step: step.mask & step["observation_mask"].bool(),
    "M4": lambda step: step.mask & ~step.attended,
    "M5": lambda step: step.mask & ~step.sampled & (step.per_token(step.trainer) < -0.5),
    "M6": lambda step: step.ends(Ended.STOP) & step.attended & ~step.mask,
    "M7": lambda step: step.ends(Ended.LENGTH) & step.mask,
    "M8": two_begins,
    "M9": lambda step: step.per_token("responses") != step.per_token("ids"),
    "M10": lambda step: (
        lost := step.sampled & ~step.mask & step.rows[:, None],
        {"note": (lost.sum(1) == 1)[step.rows].double().mean() < 0.9},
    ),
    **{"G1": mixed, "G2": sizes, "G4": copies},
    "G3": lambda step: (
        ("values" not in step) & (group_count(step["group_ids"]).max() < 2) & (group_count(_same(step.prompts)) > 1)
    ),
    **{"A1": sums, "A2": other_statistics, "A3": wrong_rows, "A4": of_constant},
    "A5": lambda step: correlation(*step.tokens("gradients", "advantages")) > 0.3,
    "R1": place,
    **{"N1": not_finite, "N2": denominator, "N3": factor},
    "N4": lambda step: ~step.mask & (step["gradients"] != 0),
}
