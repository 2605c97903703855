"""A trainer of somebody else's that imports the maths.

``tests/test_release.py`` runs it beside nothing but the wheel and its core dependencies, and has mypy --strict and
pyright's strict mode check it against the types that were installed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlprims import DataProto, advantage, algorithms, filters, grouping, layout, losses, rewards
from rlprims.algorithms import Algorithm
from rlprims.execution import Execution, ModelConfig, OptimizerConfig, RayConfig, Sampling, UpdateReport
from rlprims.types import Metrics, Totals, merge_metrics

if TYPE_CHECKING:  # the reference trainer needs an extra, which this environment has not
    from rlprims.trainer.config import Config
    from rlprims.trainer.data import DataConfig

PROMPTS, SAMPLES, LENGTH, WORDS = 4, 8, 3, 5
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def best_of_group(
    rewards: Tensor, group_ids: Tensor, response_mask: Tensor, cu_seqlens: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """An estimator of one's own: only the best responses of a group earn."""
    scores = layout.sequence_sum(rewards, response_mask, cu_seqlens)
    _, best = grouping.group_bounds(scores, group_ids)
    earned = torch.where(scores == best, scale * (scores - grouping.group_mean(scores, group_ids)), 0.0)
    return layout.to_tokens(earned, response_mask, cu_seqlens)


def sample(logits: Tensor, generator: torch.Generator) -> DataProto:
    """Responses of one table of logits for every prompt, and their scores: how often they say the prompt's number."""
    probabilities = logits.detach().softmax(-1).repeat_interleave(SAMPLES, 0)
    words = torch.stack([torch.multinomial(probabilities, 1, generator=generator)[:, 0] for _ in range(LENGTH)], 1)
    prompt = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    batch = DataProto.from_dict(
        {"prompt": prompt, "words": words, "scores": (words == prompt[:, None]).float().mean(1)},
        {"uid": [f"prompt {row // SAMPLES}" for row in range(len(prompt))]},
    )
    batch["response_mask"] = torch.ones(words.shape, dtype=torch.bool)
    return batch


def log_probs_of(logits: Tensor, batch: DataProto) -> Tensor:
    words: Tensor = batch["words"]
    prompt: Tensor = batch["prompt"]
    return logits.log_softmax(-1)[prompt].gather(1, words)


def loss_of(logits: Tensor, batch: DataProto, totals: Totals) -> Tensor:
    """Of a micro-batch; over the whole step they sum to the mean."""
    mask: Tensor = batch["response_mask"]
    new, old, advantages = log_probs_of(logits, batch), batch["old_log_probs"], batch["advantages"]
    per_token = losses.clipped_surrogate(new, old, advantages, mask, clip_high=0.28)
    return losses.token_mean(per_token, mask, totals=totals)


def train(estimator: Estimator, *, steps: int, seed: int = 0) -> float:
    """The mean score of the last step."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(PROMPTS, WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    score = 0.0
    for _ in range(steps):
        batch = sample(logits, generator)
        score = float(batch["scores"].mean())
        batch = batch[filters.varied_scores(batch["scores"], batch["prompt"])]
        if len(batch) == 0:
            continue
        mask: Tensor = batch["response_mask"]
        placed = rewards.at_last_token(batch["scores"], mask)
        batch["advantages"] = estimator(placed, grouping.dense_ids(batch["prompt"]), mask)
        batch["old_log_probs"] = log_probs_of(logits, batch).detach()
        totals = losses.count_totals(mask)
        for part in batch.split(SAMPLES):
            torch.autograd.backward(loss_of(logits, part, totals))
        optimizer.step()
        optimizer.zero_grad()
    return score


def algorithm_of_mine() -> Algorithm:
    mine = algorithms.dapo(max_length=64, buffer_length=16).replace(
        name="mine",
        advantage=algorithms.use(best_of_group, scale=2.0),
        aggregation=losses.seq_mean_token_mean,
    )
    assert not [finding for finding in algorithms.check(mine) if "advantage" in finding.message]
    return mine


def remote_step(
    execution: Execution, prompts: DataProto, algorithm: Algorithm, score: Callable[[DataProto], Tensor], seed: int
) -> tuple[UpdateReport, Metrics]:
    """One step on whatever runs the models."""
    batch = execution.generate(prompts, Sampling(max_new_tokens=LENGTH), seed=seed, prompt_width=1)
    batch["old_log_probs"] = execution.log_probs(batch)
    batch["scores"] = score(batch)
    shaped = algorithms.shape_scores(algorithm, {name: batch[name] for name in ("scores", "response_mask")})
    data = {name: batch[name] for name in ("group_ids", "response_mask", "old_log_probs")} | shaped
    for name, tensor in algorithms.estimate_advantages(algorithm, data).items():
        batch[name] = tensor
    report = execution.update(batch, algorithm)
    execution.sync_weights()
    return report, merge_metrics(report.metrics)


def run_of_mine(data: "DataConfig") -> "Config":
    """A setting that is not named has its default, for type checkers too."""
    from rlprims.trainer.config import Config

    model, optimizer = ModelConfig(path="models/mine"), OptimizerConfig(lr=1e-6)
    place = Path("runs/mine")
    return Config(
        run_dir=place, algorithm=algorithm_of_mine(), model=model, data=data, optimizer=optimizer, ray=RayConfig()
    )


if __name__ == "__main__":
    for estimator in (advantage.grpo, advantage.rloo, best_of_group):
        assert train(estimator, steps=60) > train(estimator, steps=1) + 0.5
    changed = algorithms.diff(algorithms.dapo(max_length=64, buffer_length=16), algorithm_of_mine())
    assert changed["aggregation.fn"] == ("rlprims.losses.token_mean", "rlprims.losses.seq_mean_token_mean")
    assert ModelConfig(path="models/mine").reference is None
