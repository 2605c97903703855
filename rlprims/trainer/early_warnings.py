"""Notes early in a run: the column that the filter reads, and scores that are all equal."""

import torch
from rich.console import Console

from rlprims.algorithms import filter_column
from rlprims.data_proto import DataProto
from rlprims.reports.progress import print_samples
from rlprims.runs.steps import StepResult
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.loop import Trainer
from rlprims.trainer.scoring.rewards import verify
from rlprims.trainer.sources.responses import prompt_rows

_STEPS = 3
"""Steps whose scores are compared. If one response in a hundred is right, these steps mostly contain one."""

_SHOWN = 3
"""Responses that are printed, of different prompts if possible."""


def filter_note(config: Config, example: Example) -> str | None:
    """A note about the column that the filter reads; None if it is that of the config.

    The verifier scores one response, which is the answer itself. If it returns one number, another column is an error.
    """
    algorithm = config.algorithm
    limits = algorithm.filter
    if limits is None or "scores" not in limits.keep.needs or config.replay is not None:
        return None
    if config.data.environment is not None or config.rewards:
        return None  # an environment needs a model; and several rewards give one weighted score
    verifier = config.verifiers()[0]
    rows = prompt_rows([example], [0], copies=1, first_sample=0, has_images=True)
    rows = rows.union(DataProto.from_dict(non_tensors={"response": [str(example.answer)]}))
    scored = verify(verifier, rows, config.scoring)
    if not scored["scores"].isfinite().all():
        return None
    returned = scored.batch.keys() - rows.batch.keys()
    made = {"shaped_scores", *config.score_parts, *(part.fn.__name__ for part in algorithm.score_shaping)}
    column, metric = filter_column(algorithm, returned | made), limits.metric
    if column == metric:
        return None
    if column is not None:
        return f"{verifier.path} returns no acc: the filter looks at {column}"
    missing = f"algorithm.filter.metric is {metric!r}, and {verifier.path} returned {sorted(returned)}"
    if returned == {"scores"}:
        raise ValueError(f"{missing}: write scores, or return a dict with {metric!r}")
    return f"{missing} for the answer of the first question"


class EqualScores:
    """A hook that prints a note and some responses after the first steps if all their scores were equal.

    The scores are the shaped ones, so a length penalty counts as a difference. Responses without a score are ignored.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.scores: list[torch.Tensor] = []
        self.steps_seen = 0

    def __call__(self, trainer: Trainer, step: StepResult) -> None:
        if step.number > _STEPS or step.number != self.steps_seen + 1:
            return
        self.steps_seen = step.number
        sampled = [step.batch, *(rows for rows, _ in step.dropped)]
        self.scores += [rows["shaped_scores" if "shaped_scores" in rows else "scores"] for rows in sampled]
        if self.steps_seen < _STEPS:
            return
        scores = torch.cat(self.scores)
        scores = scores[scores.isfinite()]
        if len(scores) and scores.min() == scores.max():
            self._print_note(len(scores), float(scores[0]), step.batch)

    def _print_note(self, count: int, score: float, batch: DataProto) -> None:
        text = (
            f"every score of the first {_STEPS} steps is {score:g} ({count} responses): nothing can be learned from "
            "them. Does the prompt have the form that the model expects (data.template: chat)? Is the answer within "
            "sampling.max_new_tokens? Does the verifier find it? Is the task too hard, or too easy?"
        )
        self.console.print(text, style="yellow", highlight=False, soft_wrap=True)
        groups = batch["group"].tolist()
        firsts = [groups.index(group) for group in dict.fromkeys(groups)]
        others = [row for row in range(len(batch)) if row not in firsts]
        shown = batch.select_idxs(sorted([*firsts, *others][:_SHOWN]))
        for i in range(len(shown)):
            print_samples(self.console, "nothing to learn from", [shown[i : i + 1]], 1)
