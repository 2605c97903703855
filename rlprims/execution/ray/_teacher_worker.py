"""The Ray actor of a teacher in a vLLM engine. It has the methods of a training rank that measure the teacher."""

from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, RayConfig
from rlprims.execution._meter import metered
from rlprims.execution._profile import Observed
from rlprims.execution.hf._models import check_vocabularies
from rlprims.execution.ray._division import SCORED
from rlprims.execution.ray._rollout_worker import without_collection
from rlprims.execution.ray._worker_group import everywhere, reads, split


class TeacherWorker(Observed):
    """One engine with the whole teacher. Engines do not know each other: each scores its part of a batch."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.engine: Any = None

    @everywhere
    def build(self, cluster: RayConfig, model: ModelConfig, algorithm: Algorithm) -> None:
        """Load the teacher, if the algorithm has one."""
        torch.set_num_threads(1)
        if not algorithm.needs_teacher:
            return
        check_vocabularies(model)
        with without_collection():
            from rlprims.execution.ray._vllm_scorer import VllmScorer
        (path,) = model.teachers.values()
        self.engine = VllmScorer(path, model, cluster)

    @split
    @reads(SCORED)
    @metered
    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        log_probs: Tensor = self._scorer(batch).log_probs(batch)
        return log_probs

    @split
    @reads(SCORED | {"topk_ids"})
    @metered
    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        top: DataProto = self._scorer(batch).top(batch, size)
        return top

    def _scorer(self, batch: DataProto) -> Any:
        if self.engine is None:
            raise ValueError("no teacher was loaded: the algorithm does not read teacher_log_probs")
        if "kept_counts" in batch:
            raise ValueError(
                "expected a batch of untruncated sampling, got one with kept_counts: a teacher in vLLM scores over its "
                "whole vocabulary; use ray.teacher_engine: hf"
            )
        return self.engine
