"""A note early in a run if all of its first scores are equal, so that it has no gradient."""

import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.reports.examine import examine
from rlprims.trainer.loop import Step, Trainer

STEPS = 3
"""The number of steps. If one response in a hundred is right, these steps mostly contain one."""

_SHOWN = 3
"""Responses that are printed, of different prompts if there are as many."""


class EqualScores:
    """A hook for the first steps; if all scores were equal it prints a note, once, with some responses.

    A policy gradient compares responses: if all have one score, every advantage of a group is 0. Shaped scores are
    compared, so a length penalty counts as a difference; responses without a score do not count.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.scores: list[torch.Tensor] = []
        self.looked_at = 0

    def __call__(self, trainer: Trainer, step: Step) -> None:
        if step.number > STEPS or step.number != self.looked_at + 1:
            return
        self.looked_at = step.number
        sampled = [step.batch, *(rows for rows, _ in step.dropped)]
        self.scores += [rows["shaped_scores" if "shaped_scores" in rows else "scores"] for rows in sampled]
        if self.looked_at < STEPS:
            return
        scores = torch.cat(self.scores)
        scores = scores[scores.isfinite()]
        if len(scores) and scores.min() == scores.max():
            self._say(len(scores), float(scores[0]), step.batch)

    def _say(self, count: int, score: float, batch: DataProto) -> None:
        self.console.print(
            f"every score of the first {STEPS} steps is {score:g} ({count} responses): nothing can be learned from "
            "them. Does the prompt ask as the model is used to (data.template: chat)? Is there room for the answer "
            "(sampling.max_new_tokens)? Does the verifier find it? Is the task so hard, or so easy?",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
        groups = batch["group"].tolist()
        firsts = [groups.index(group) for group in dict.fromkeys(groups)]
        others = [row for row in range(len(batch)) if row not in firsts]
        shown = batch.select_idxs(sorted([*firsts, *others][:_SHOWN]))
        for i in range(len(shown)):
            examine(self.console, "nothing to learn from", [shown[i : i + 1]], 1)
