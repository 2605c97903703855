"""The training loop on stored rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution import reads_reference
from rlprims.execution.hf import StoredTraining
from rlprims.fit.config import FitConfig
from rlprims.fit.rows import StoredRow, StoredRows, as_batch
from rlprims.runs.disk_errors import writing
from rlprims.runs.metrics import Clock, summarize
from rlprims.runs.rows import RowOrder
from rlprims.runs.steps import StepResult
from rlprims.runs.wrong_numbers import first_not_finite
from rlprims.types import merge_metrics


def steps_of(config: FitConfig, rows: int) -> int:
    """The number of optimizer steps: as configured, or as many as the epochs need. The last one may be smaller."""
    return config.steps or -(-config.epochs * rows // config.rows_per_step)


class FitTrainer:
    """The state of a run on stored rows, and its step. ``reference`` (R,) has one number for each response."""

    def __init__(
        self,
        config: FitConfig,
        training: StoredTraining,
        rows: StoredRows,
        *,
        pad_token_id: int,
        reference: Tensor | None = None,
    ) -> None:
        self.config, self.training, self.rows = config, training, rows
        self.pad_token_id, self.reference = pad_token_id, reference
        self.steps = steps_of(config, len(rows.rows))
        self.order = RowOrder(len(rows.rows), seed=config.seed, shuffle=config.data.shuffle)
        self.step_number = 0
        self.digest = rows.digest()

    def step(self) -> StepResult:
        self.step_number += 1
        clock = Clock()
        size = self.config.rows_per_step
        if self.config.steps is None:  # whole epochs
            size = min(size, self.config.epochs * len(self.rows.rows) - self.order.position)
        chosen = self.order.take(size)
        batch = batch_of(self.rows.rows, chosen, self.pad_token_id, self.reference)
        batch["sample_id"] = torch.tensor(chosen).repeat_interleave(len(batch) // size)
        with clock("update"):
            report = self.training.update_rows(batch)
        tokens, learned = int(batch["attention_mask"].sum()), float(batch["response_mask"].sum())
        metrics = summarize([report]) | {
            "skipped_updates": float(report.skipped),
            "epoch": self.order.position / len(self.rows.rows),
            "rows": float(size),
            "learned_tokens": learned,
            "length": learned / len(batch),
        }
        metrics |= clock.metrics(tokens)
        return StepResult(self.step_number, batch, [], [], metrics, [("policy", report)])

    def not_finite(self, model: str, batch: DataProto) -> str:
        measure = self.training.measure_rows
        if self.training.kind != "demonstrations":
            losses = [measure(batch[i : i + 2])["pairs/loss"].value() for i in range(0, len(batch), 2)]
            batch["loss"], model = torch.tensor(losses).repeat_interleave(2), "model"
        return first_not_finite(self.training, self.training.algorithm, model, batch)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        return {"step_number": self.step_number, "position": self.order.position, "rows": self.digest}, {}

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None:
        if state["rows"] != self.digest:
            raise ValueError(
                f"{self.config.data.train}: expected the rows that the run began with, got others: put the file and "
                "the data settings back, or start a new run"
            )
        self.step_number, self.order.position = state["step_number"], state["position"]


def measure(
    training: StoredTraining, rows: Sequence[StoredRow], config: FitConfig, pad_token_id: int, reference: Tensor | None
) -> dict[str, float]:
    """The metrics of held-out rows, as means over all of them."""
    chunks = _chunks(len(rows), config.rows_per_step)
    parts = [training.measure_rows(batch_of(rows, chunk, pad_token_id, reference)) for chunk in chunks]
    return {name: float(metric.value()) for name, metric in merge_metrics(*parts).items()}


def batch_of(rows: Sequence[StoredRow], which: Sequence[int], pad_token_id: int, reference: Tensor | None) -> DataProto:
    """Some rows, with the reference's log-probs of their responses if they are known."""
    batch = as_batch([rows[i] for i in which], pad_token_id)
    if reference is not None:
        batch["ref_sequence_log_probs"] = reference.view(-1, 2)[list(which)].flatten()
    return batch


def reference_log_probs(
    training: StoredTraining, rows: Sequence[StoredRow], config: FitConfig, pad_token_id: int
) -> Tensor:
    """float (R,): the log-probs of the responses under the model's current weights."""
    chunks = _chunks(len(rows), config.rows_per_step)
    return torch.cat([training.sequence_log_probs(batch_of(rows, chunk, pad_token_id, None)) for chunk in chunks])


def _chunks(rows: int, size: int) -> Iterator[range]:
    return (range(begin, min(rows, begin + size)) for begin in range(0, rows, size))


def needs_reference(config: FitConfig) -> bool:
    return config.kind == "pairs" and reads_reference(config.loss)


def save_reference(file: Path, log_probs: Tensor, digest: str) -> None:
    """Write the log-probs of the model at the start, so that a resumed run uses the same numbers."""
    with writing(file):
        DataProto.from_dict({"log_probs": log_probs}, meta_info={"rows": digest}).save(file)


def load_reference(file: Path, digest: str) -> Tensor | None:
    """The log-probs that :func:`save_reference` wrote; None if there are none, or they are for other rows."""
    if not file.exists():
        return None
    stored = DataProto.load(file)
    return stored["log_probs"] if stored.meta_info["rows"] == digest else None
