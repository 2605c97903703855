"""The metrics of a training batch before its updates."""

from rlprims import diagnostics
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.grouping import dense_ids
from rlprims.trainer.old_groups import old_group_metrics
from rlprims.trajectories import join_rows
from rlprims.types import Metrics


def _responses(batch: DataProto) -> Metrics:
    """Metrics of scores and lengths. Rows without a score are ignored; a rollout counts once, with all its tokens."""
    scored = batch["scores"].isfinite()
    scores, mask = batch["scores"][scored], batch["response_mask"][scored]
    if "trajectory_ids" not in batch:
        return diagnostics.response_stats(scores, mask)
    joined = join_rows(dense_ids(batch["trajectory_ids"][scored]), mask)
    count = int(joined.exists.sum())
    cu_seqlens = joined.cu_seqlens[: count + 1]
    return diagnostics.response_stats(joined.rows(scores)[:count], joined.tokens(mask), cu_seqlens)


def batch_metrics(batch: DataProto, *, weights_version: int) -> dict[str, float]:
    """The metrics of a training batch before its updates; ``weights_version`` is that of the sampler's weights."""
    mask = batch["response_mask"]
    metrics = _responses(batch)
    metrics["trained_score"] = metrics.pop("score")
    metrics["truncated"] = diagnostics.fraction(batch["ended"] == Ended.LENGTH)
    for code in set(batch["ended"].tolist()) - {Ended.STOP, Ended.LENGTH}:
        metrics[f"ended/{Ended(code).label}"] = diagnostics.fraction(batch["ended"] == code)
    metrics["advantage_abs"] = diagnostics.mean_over_tokens(batch["advantages"].abs(), mask)
    if "old_log_probs" in batch:
        metrics |= diagnostics.sampler_mismatch(batch["old_log_probs"], batch["rollout_log_probs"], mask)
        metrics |= _largest_mismatch(batch)
    for name, other in (("ref_kl", "ref_log_probs"), ("teacher_kl", "teacher_log_probs")):
        if other in batch:  # an estimate of KL(policy || other), before the update
            metrics[name] = diagnostics.mean_over_tokens(batch["rollout_log_probs"] - batch[other], mask)
    if "teacher_mask" in batch:
        metrics["teacher_rows"] = diagnostics.fraction(batch["teacher_mask"].any(-1))
    if "returns" in batch:
        metrics["explained_variance"] = diagnostics.explained_variance(batch["values"], batch["returns"], mask)
    age = weights_version - batch["weights_version"]
    described = {name: float(metric.value()) for name, metric in metrics.items()}
    described |= {"staleness": float(age.float().mean()), "staleness_max": float(age.max())}
    return described | old_group_metrics(batch)


def _largest_mismatch(batch: DataProto) -> Metrics:
    """The largest mismatch in rows of the newest weights, and in rows of older ones, which also differ by updates."""
    columns, versions = (batch["old_log_probs"], batch["rollout_log_probs"]), batch["weights_version"]
    older = (versions < versions.max())[:, None] & batch["response_mask"]
    newest = diagnostics.sampler_mismatch(*columns, batch["response_mask"] & ~older)["mismatch_max"]
    if not older.any():
        return {"mismatch_max": newest}
    return {"mismatch_max": newest, "mismatch_max_stale": diagnostics.sampler_mismatch(*columns, older)["mismatch_max"]}
