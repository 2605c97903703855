"""Groups of earlier batches that are trained on again: a replay buffer, bounded in size and age.

The age of a group is the number of updates between the oldest weights that drew one of its tokens and those that it
trains. Its rows keep what was sampled and scored; a step computes the rest anew. So the importance weights compare the
policy of today with the sampler of then.
"""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from rlprims import diagnostics
from rlprims.data_proto import DataProto
from rlprims.ratios import log_ratio
from rlprims.runs.config import Section
from rlprims.trainer.sources.settings import SamplingSettings

_DRAWS = 2**60  # of the numbers by which a seed draws: prompts use those below, pools those from 2**61 on


class OldGroupsConfig(Section):
    """Groups of earlier batches in a batch."""

    share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of prompts_per_step that are groups of earlier batches, rounded down but at least 1 group; "
        "so many fewer are sampled. 0: none",
    )
    max_age: int = Field(
        default=4, ge=1, description="largest number of updates between a group's oldest weights and those it trains"
    )
    capacity: int = Field(default=64, ge=1, description="groups that are kept; beyond it the oldest leave")

    def count(self, groups: int) -> int:
        """The old groups in a batch of so many groups, if enough are kept."""
        return max(1, int(self.share * groups + 1e-9)) if self.share else 0


class OldGroups:
    """The groups of earlier batches, oldest first; ``groups`` is the whole state."""

    def __init__(self, config: OldGroupsConfig, *, in_batch: int, seed: int) -> None:
        self.config, self.in_batch, self.seed = config, config.count(in_batch), seed
        self.groups: list[DataProto] = []

    def draw(self, version: int) -> list[DataProto]:
        """The old groups of the batch that trains the weights ``version``, with the column ``group_age``.

        Groups that are too old leave. The others stay, so that a group may be in several batches, in each once.
        """
        self.groups = [rows for rows in self.groups if version - _oldest(rows) <= self.config.max_age]
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, _DRAWS + version], dtype=np.uint64)))
        drawn = sorted(generator.permutation(len(self.groups))[: self.in_batch])
        return [_with_age(self.groups[i], version) for i in drawn]

    def add(self, groups: Sequence[DataProto]) -> None:
        """Add the new groups of a batch; beyond the capacity the oldest leave."""
        if self.in_batch:
            self.groups = sorted([*self.groups, *groups], key=_oldest)[-self.config.capacity :]


def _oldest(rows: DataProto) -> int:
    return int(rows["weights_version"].min())


def _with_age(rows: DataProto, version: int) -> DataProto:
    age = torch.full((len(rows),), float(version - _oldest(rows)))
    return rows.union(DataProto.from_dict(tensors={"group_age": age}))


def old_group_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of the old groups in a batch: their ages, and the importance weights of their tokens."""
    if "group_age" not in batch:
        return {}
    is_old = batch["group_age"].isfinite()  # new groups have none
    ages, mask = batch["group_age"][is_old], batch["response_mask"] & is_old[:, None]
    ratios = log_ratio(batch["old_log_probs"], batch["rollout_log_probs"], mask).exp()
    weights = diagnostics.weight_stats(ratios, mask)
    values = {"age": ages.mean(), "age_max": ages.max()}
    values |= {"weight": weights["weight_mean"].value(), "ess": weights["weight_ess"].value()}
    return {f"old_groups/{name}": float(value) for name, value in values.items()}


def check_old_groups(old: OldGroupsConfig, config: SamplingSettings) -> None:
    """Raise a ValueError for settings of old groups that cannot be combined."""
    groups, ahead, algorithm = config.prompts_per_step, config.max_staleness, config.algorithm
    count = old.count(groups)
    fix = "add corrections: [rlprims.corrections.tis], or use a loss that reads rollout_log_probs"
    for wrong, reason in (
        (count >= groups, f"of prompts_per_step: {groups} leaves no group to sample: use more prompts"),
        (old.capacity < count, f"is {count} groups, and old_groups.capacity: {old.capacity} is fewer"),
        (ahead > 1, f"needs max_staleness: 0 or 1, got {ahead}: groups that go on through updates fill batches"),
        (old.max_age <= ahead, f"needs old_groups.max_age above max_staleness: {ahead}, got {old.max_age}"),
        (config.replay is not None, "trains on samples of this run: leave out either it or replay"),
        (algorithm.baseline is not None, "would count scores twice in algorithm.baseline: leave out one of them"),
        ("rollout_log_probs" not in algorithm.needs, f"needs importance weights, not in {algorithm.name}: {fix}"),
    ):
        if count and wrong:
            raise ValueError(f"old_groups.share: {old.share:g} {reason}")
