"""Scores of responses by causal language models: log-probs, entropies, and the likeliest tokens."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig
from rlprims.execution.hf._forward import token_scores
from rlprims.execution.hf._micro_batches import Ranks, parts_of
from rlprims.execution.hf._packed import is_packed
from rlprims.execution.hf._routes import without_routes


class Scorer:
    """A causal language model that scores responses, at the sampler's temperature."""

    def __init__(self, module: nn.Module, model: ModelConfig, ranks: Ranks, temperature: float) -> None:
        self.module, self.model, self.ranks, self.temperature = module, model, ranks, temperature
        self.packing = is_packed(module) and model.packing is not False

    def measured(self, batch: DataProto, name: str, temperature: float | None = None) -> Tensor:
        """(B, T): ``log_probs`` or ``entropies``, at the sampler's temperature or at another."""

        def forward(part: dict[str, Tensor]) -> Tensor:
            return self.token_scores(part, [name], temperature)[name]

        return per_token(batch, forward, self.model, self.ranks, packing=self.packing)

    def top(self, batch: DataProto, size: int) -> dict[str, Tensor]:
        """``topk_ids`` int64 (B, T, K), the batch's or the likeliest tokens, and ``topk_log_probs`` of these."""
        size = min(size, self.module.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
        shape = (*batch["response_mask"].shape, size)
        found = {"topk_ids": torch.zeros(shape, dtype=torch.int64), "topk_log_probs": torch.zeros(shape)}
        with torch.no_grad():
            for rows, part, _ in parts_of(batch, self.model, self.ranks, packing=self.packing):
                scores = self.token_scores(part, ["topk_log_probs"], top=size)
                if rows:
                    for name, x in scores.items():
                        found[name][rows, : x.shape[1]] = x.to("cpu", found[name].dtype)
        return found

    def token_scores(
        self, part: dict[str, Tensor], wanted: Collection[str], temperature: float | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """The scores of a micro-batch by name, see :func:`rlprims.execution.hf._forward.token_scores`."""
        fused = self.model.fused_head and "topk_log_probs" not in wanted  # which need the whole vocabulary
        at = self.temperature if temperature is None else temperature
        compute = partial(token_scores, self.module, part, temperature=at, wanted=wanted, **options)
        if not fused:  # the model's own forward pass, in which ranks also gather the whole head
            return compute(packing=self.packing, fused_head=False)
        with_head = partial(compute, packing=self.packing, fused_head=True)
        return self.ranks.within(self.module, with_head)  # type: ignore[no-any-return]


@torch.no_grad()
def per_token(
    batch: DataProto, forward: Callable[[dict[str, Tensor]], Tensor], model: ModelConfig, ranks: Ranks, *, packing: bool
) -> Tensor:
    """(B, T): a number for each response token, computed in micro-batches; 0 elsewhere."""
    result = torch.zeros(batch["response_mask"].shape)
    for rows, part, _ in parts_of(batch, model, ranks, packing=packing):
        x = torch.where(part["response_mask"], forward(part), 0.0)
        if rows:
            result[rows, : x.shape[1]] = x.cpu()
    return result


class Teachers:
    """The teachers by name. If there are several, the column ``teacher`` names one for each row."""

    def __init__(self, scorers: Mapping[str, Scorer], ranks: Ranks) -> None:
        self.scorers, self.ranks = scorers, ranks

    def log_probs(self, batch: DataProto) -> Tensor:
        found = self._chosen(batch, lambda teacher, rows: {"log_probs": teacher.measured(rows, "log_probs")})
        return found["log_probs"]

    def top(self, batch: DataProto, size: int) -> DataProto:
        """``topk_ids`` of the batch or of the teacher, and ``teacher_topk_log_probs`` of these tokens."""
        found = self._chosen(batch, lambda teacher, rows: teacher.top(rows, size))
        columns = {"topk_ids": found["topk_ids"], "teacher_topk_log_probs": found["topk_log_probs"]}
        return DataProto.from_dict(tensors=columns)

    def _chosen(self, batch: DataProto, measure: Callable[[Scorer, DataProto], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What each row's teacher measures."""
        if not self.scorers:
            raise ValueError("no teacher was loaded: the algorithm does not read teacher_log_probs")
        batch = without_routes(batch)
        if len(self.scorers) == 1:
            return measure(next(iter(self.scorers.values())), batch)
        names = batch["teacher"] if "teacher" in batch else [None] * len(batch)
        if unknown := sorted({str(name) for name in names} - self.scorers.keys()):
            raise ValueError(
                f"the column teacher has {unknown}; model.teacher has {sorted(self.scorers)}: set data.teacher"
            )
        result: dict[str, Tensor] = {}
        for name, teacher in self.scorers.items():
            mine = torch.tensor([each == name for each in names], dtype=torch.bool)
            if self.ranks.size > 1:  # all rows, so that all ranks do the same forward passes
                found = {key: x[mine] for key, x in measure(teacher, batch).items()}
            elif mine.any():
                found = measure(teacher, batch[mine])
            else:
                continue
            for key, x in found.items():
                result.setdefault(key, x.new_zeros(len(batch), *x.shape[1:]))[mine] = x
        return result
