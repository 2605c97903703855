"""Tasks in which every response can be listed, so that expectations are exact, and tabular policies trained on them.

In a notebook or a test, with this file beside it; no model is needed, and a training takes a second:

>>> from rlprims import algorithms
>>> run = train(stop_after((1, 3)), algorithms.grpo(kl_coef=0.0).replace(group_size=16), steps=60)
>>> run.expected_scores[0], run.expected_scores[-1] > 0.9
(0.15625, True)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from einops import rearrange, repeat
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm, policy_objective, token_weights, value_objective
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_sum
from rlprims.types import PerSequence, PerToken, TokenMask

Score = Callable[[int, tuple[int, ...]], float | Mapping[str, float]]
_MOST = 100_000


class TabularTask:
    """Prompts, and responses of a few tokens; the policy is a table of logits, (P, T, V + 1, V).

    The logits of a token are looked up by prompt, position and the token before it; the last row of the third axis is
    for the first token. All responses are listed, so probabilities and expected scores are sums and not estimates.

    Args:
        score: (prompt, response) to a score, or to a mapping with ``score`` and other columns, like a verifier.
        prompts: P, the number of prompts.
        vocabulary: V, the number of tokens in the vocabulary.
        length: T, the largest length of a response.
        stop: the token that ends a response; None: all responses have length T.

    Raises:
        ValueError: more than 100,000 responses.

    >>> task = TabularTask(lambda prompt, response: float(sum(response)), vocabulary=2, length=2)
    >>> float(task.expected_score(task.uniform()))
    1.0
    """

    def __init__(
        self, score: Score, *, prompts: int = 1, vocabulary: int = 2, length: int = 1, stop: int | None = None
    ) -> None:
        if vocabulary**length > _MOST:
            raise ValueError(f"vocabulary {vocabulary} to the power of length {length} is over {_MOST} responses")
        self.prompts, self.vocabulary, self.length, self.stop = prompts, vocabulary, length, stop
        listed = dict.fromkeys(_cut(tokens, stop) for tokens in product(range(vocabulary), repeat=length))
        self.listed = list(listed)
        lengths = torch.tensor([len(tokens) for tokens in self.listed])
        self.responses = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in self.listed])
        self.masks = torch.arange(length) < lengths[:, None]
        results = [[score(p, tokens) for tokens in self.listed] for p in range(prompts)]
        rows = [[one if isinstance(one, Mapping) else {"score": one} for one in row] for row in results]
        columns = {name: [[float(one[name]) for one in row] for row in rows] for name in rows[0][0]}
        self.columns = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}

    def uniform(self) -> Tensor:
        """The logits of the uniform policy, float64."""
        return torch.zeros(self.prompts, self.length, self.vocabulary + 1, self.vocabulary, dtype=torch.float64)

    def lookup(self, table: Tensor, prompts: Tensor, responses: Tensor) -> Tensor:
        """The entries of a table (P, T, V + 1, ...) for each token of the responses: (B, T, ...)."""
        return table[prompts[:, None], torch.arange(self.length), self._before(responses)]

    def _before(self, responses: Tensor) -> Tensor:
        """The token before each token; V before the first one."""
        return torch.cat([torch.full_like(responses[:, :1], self.vocabulary), responses[:, :-1]], 1)

    def log_probs(self, logits: Tensor, prompts: Tensor, responses: Tensor, mask: TokenMask) -> PerToken:
        """The log-prob of each token, with gradient; 0 outside the mask."""
        all_tokens = self.lookup(logits.log_softmax(-1), prompts, responses)
        return torch.where(mask, all_tokens.gather(-1, responses[..., None])[..., 0], 0.0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability of each listed response to each prompt: (P, R), exact; rows sum to 1."""
        prompts = repeat(torch.arange(self.prompts), "p -> (p r)", r=len(self.listed))
        responses, masks = (repeat(x, "r t -> (p r) t", p=self.prompts) for x in (self.responses, self.masks))
        log_probs = self.log_probs(logits, prompts, responses, masks)
        return rearrange(log_probs.sum(-1).exp(), "(p r) -> p r", p=self.prompts)

    def expected_score(self, logits: Tensor, column: str = "score") -> Tensor:
        """Σ π(y) score(y), the mean over prompts; its gradient is the exact policy gradient."""
        return (self.probabilities(logits) * self.columns[column]).sum(-1).mean()

    def best_score(self) -> float:
        """The largest expected score of any policy."""
        return float(self.columns["score"].max(-1).values.mean())

    def sample(self, logits: Tensor, group_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        """``group_size`` responses to each prompt, with all data that an algorithm may need except values."""
        with torch.no_grad():
            drawn = torch.multinomial(self.probabilities(logits), group_size, replacement=True, generator=generator)
            prompts = repeat(torch.arange(self.prompts), "p -> (p g)", g=group_size)
            batch = self.batch(logits, prompts, rearrange(drawn, "p g -> (p g)"))
            return {**batch, "baseline_scores": repeat(self._greedy_scores(logits), "p -> (p g)", g=group_size)}

    def batch(self, logits: Tensor, prompts: Tensor, indices: Tensor) -> dict[str, Tensor]:
        """The batch of the listed responses ``indices`` to ``prompts``; this policy is sampler and reference.

        Every token is a turn: an action in a state, which is its position and the token before.
        """
        with torch.no_grad():
            responses, mask = self.responses[indices], self.masks[indices]
            log_probs = self.log_probs(logits, prompts, responses, mask)
            columns = {name: column[prompts, indices] for name, column in self.columns.items()}
            scores = columns.pop("score")
            turns = torch.arange(self.length).expand(responses.shape)
            unfinished = mask.all(-1) & (responses[:, -1] != self.stop) & (self.stop is not None)
            return {
                "responses": responses,
                "response_mask": mask,
                **dict.fromkeys(("old_log_probs", "rollout_log_probs", "ref_log_probs"), log_probs),
                **self.moments(logits, prompts, responses, mask),
                **dict.fromkeys(("observation_mask", "expert_mask"), torch.zeros_like(mask)),
                "turn_ids": turns,
                "state_ids": turns * (self.vocabulary + 1) + self._before(responses),
                "action_ids": responses,
                "acc": scores,
                **columns,
                "scores": scores,
                "group_ids": prompts,
                "ended": unfinished.to(torch.int8),  # LENGTH or STOP
            }

    def moments(self, logits: Tensor, prompts: Tensor, responses: Tensor, mask: TokenMask) -> dict[str, PerToken]:
        """``entropies`` and ``sum_pi_squared`` of the distribution that each token is drawn from."""
        log_p = self.lookup(logits.log_softmax(-1), prompts, responses)
        p = log_p.exp()
        found = {"entropies": -(p * log_p).sum(-1), "sum_pi_squared": p.square().sum(-1)}
        return {name: torch.where(mask, x, 0.0) for name, x in found.items()}

    def _greedy_scores(self, logits: Tensor) -> PerSequence:
        """The scores of the responses in which every token is the likeliest."""
        scores = []
        for prompt in range(self.prompts):
            tokens: list[int] = []
            for position in range(self.length):
                before = tokens[-1] if tokens else self.vocabulary
                tokens.append(int(logits[prompt, position, before].argmax()))
            scores.append(self.columns["score"][prompt, self.listed.index(_cut(tuple(tokens), self.stop))])
        return torch.stack(scores)


def bandit(scores: Sequence[Sequence[float]]) -> TabularTask:
    """Arms with fixed scores: ``scores[prompt][arm]``. A response is one token, the arm.

    >>> task = bandit([[0.0, 1.0]])
    >>> float(task.expected_score(task.uniform()))
    0.5
    """
    if len({len(row) for row in scores}) != 1:
        raise ValueError(f"scores has rows of {sorted({len(row) for row in scores})} arms, expected equal lengths")
    return TabularTask(lambda prompt, arm: scores[prompt][arm[0]], prompts=len(scores), vocabulary=len(scores[0]))


def stop_after(wanted: Sequence[int] = (1, 3), *, length: int = 6) -> TabularTask:
    """A small sequence task: end after exactly ``wanted[prompt]`` tokens. Token 0 stops, token 1 continues.

    >>> task = stop_after((1, 2), length=3)
    >>> [tokens for tokens, correct in zip(task.listed, task.columns["score"][1]) if correct]
    [(1, 1, 0)]
    """

    def score(prompt: int, response: tuple[int, ...]) -> float:
        return float(response[-1] == 0 and len(response) - 1 == wanted[prompt])

    return TabularTask(score, prompts=len(wanted), vocabulary=2, length=length, stop=0)


def _cut(tokens: tuple[int, ...], stop: int | None) -> tuple[int, ...]:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@dataclass(frozen=True, repr=False)
class TabularTraining:
    """The result of a training.

    Attributes:
        algorithm: the name of the algorithm.
        expected: column of the task's score to its exact expectation, before the first step and after each step.
        logits: the policy at the end.
        values: the critic at the end, (P, T, V + 1); 0 if the algorithm has no critic.
    """

    algorithm: str
    expected: dict[str, list[float]]
    logits: Tensor
    values: Tensor

    @property
    def expected_scores(self) -> list[float]:
        return self.expected["score"]

    def __repr__(self) -> str:
        first, last = self.expected_scores[0], self.expected_scores[-1]
        return f"{self.algorithm}: expected score {first:.3f}, after {len(self.expected_scores) - 1} steps {last:.3f}"


def train(
    task: TabularTask,
    algorithm: Algorithm,
    *,
    steps: int = 100,
    learning_rate: float = 0.1,
    logits: Tensor | None = None,
    seed: int = 0,
) -> TabularTraining:
    """Train a tabular policy by any algorithm: sample, score, filter, estimate, update; Adam on the logits.

    Groups that the filter drops are not sampled again: such a step trains on the remaining groups. If the algorithm
    needs a critic, it is a table too. The same seed gives the same training.

    Args:
        task: prompts, responses and scores.
        algorithm: any algorithm; each step samples ``group_size`` responses to every prompt.
        steps: the number of training batches.
        learning_rate: Adam's learning rate for policy and critic.
        logits: the initial policy, which is also the reference; uniform by default.
        seed: the seed of samples, mini-batches and random token selections.
    """
    generator = torch.Generator().manual_seed(seed)
    reference = task.uniform() if logits is None else logits.detach().clone()
    policy = reference.clone().requires_grad_()
    critic = torch.zeros(policy.shape[:3], dtype=policy.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([policy, critic], lr=learning_rate)
    controller = algorithm.kl_in_reward.controller({}) if algorithm.kl_in_reward else None
    logits_at = [policy.detach().clone()]
    for _ in range(steps):
        batch = task.sample(policy.detach(), algorithm.group_size, generator)
        where = (batch["group_ids"], batch["responses"])
        batch["ref_log_probs"] = task.log_probs(reference, *where, batch["response_mask"])
        batch["values"] = torch.where(batch["response_mask"], task.lookup(critic.detach(), *where), 0.0)
        batch["prompts"] = batch["group_ids"]
        data = with_advantages(algorithm, batch, kl_coef=controller.value if controller else 0.0)
        if controller is not None:
            drift = batch["old_log_probs"] - batch["ref_log_probs"]
            controller.update(float(sequence_sum(drift, batch["response_mask"]).mean()), len(drift))
        rows = len(data["response_mask"])
        for _ in range(algorithm.epochs):
            for part in torch.randperm(rows, generator=generator).tensor_split(algorithm.mini_batches):
                if len(part):
                    optimizer.zero_grad()
                    mini = {name: column[part] for name, column in data.items()}
                    mini["group_ids"] = dense_ids(mini["group_ids"])
                    torch.autograd.backward(_objective(task, algorithm, policy, critic, mini, generator))
                    optimizer.step()
        logits_at.append(policy.detach().clone())
    expected = {name: [float(task.expected_score(at, name)) for at in logits_at] for name in task.columns}
    return TabularTraining(algorithm.name, expected, logits_at[-1], critic.detach())


def with_advantages(algorithm: Algorithm, batch: dict[str, Tensor], *, kl_coef: float) -> dict[str, Tensor]:
    """The stages of a step before its loss: the rows of the groups that the filter keeps, with advantages."""
    data = batch
    for stage in (
        algorithms.leave_out_rows,
        algorithms.fill_invalid_scores,
        algorithms.component_scores,
        algorithms.shape_scores,
    ):
        data = {**data, **stage(algorithm, data)}
    kept = torch.tensor([reason is None for reason in algorithms.filter_groups(algorithm, data)])
    data = {name: column[kept] for name, column in data.items()}
    if kept.any():
        data["group_ids"] = dense_ids(data["group_ids"])
        data |= algorithms.estimate_advantages(algorithm, data, kl_coef=kl_coef)
        data |= algorithms.mask_turns(algorithm, data)
    return data


def _objective(
    task: TabularTask, a: Algorithm, policy: Tensor, critic: Tensor, data: dict[str, Tensor], generator: torch.Generator
) -> Tensor:
    prompts, responses, mask = data["prompts"], data["responses"], data["response_mask"]
    update = {
        **data,
        "log_probs": task.log_probs(policy, prompts, responses, mask),
        **task.moments(policy, prompts, responses, mask),
        "new_values": torch.where(mask, task.lookup(critic, prompts, responses), 0.0),
    }
    weights = token_weights(a, {**update, "log_probs": update["log_probs"].detach()}, generator=generator)
    objective = policy_objective(a, {**update, **weights})
    return objective if a.value_loss is None else objective + value_objective(a, update)
