"""Right steps to plant bugs in: ragged responses drawn from softmax policies, and the library's own stages of them.

Sampler, trainer, updated policy and reference have logits over the same vocabulary of 24 tokens, a little apart.
Positions are flat or peaked, as text is. The same seed gives the same step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.ended import Ended
from rlprims.rewards import at_last_token

BEGIN, END, PAD, TOOL, VOCAB = 1, 2, 0, 3, 24
PROMPT, WIDTH = 8, 28


@dataclass(frozen=True)
class Setup:
    """A kind of run."""

    preset: str = "grpo"
    options: str = ""
    """Words: top_p, temperature, ages, tools, gradients, losses, real (scores), trl or verl (names), wide (mask of the
    prompts too), critic, kl, right (prompts padded on the right, with positions), packs, first (update), overlong (rows
    that were cut learn nothing)."""
    groups: int = 8
    size: int = 4

    def __contains__(self, word: str) -> bool:
        return word in self.options.split()


SETUPS = (
    Setup("grpo"),
    Setup("grpo", "gradients trl"),
    Setup("grpo", "real top_p losses"),
    Setup("grpo", "ages tools verl kl"),
    Setup("dr_grpo", "wide"),
    Setup("dr_grpo", "real ages gradients"),
    Setup("dapo", "top_p gradients packs", 4, 8),
    Setup("dapo", "tools overlong", 16, 4),
    Setup("gspo", "losses"),
    Setup("gspo", "ages top_p", 4, 16),
    Setup("cispo", "temperature gradients"),
    Setup("rloo", "tools wide"),
    Setup("rloo", "real verl first"),
    Setup("opo", "right"),
    Setup("maxrl", "temperature top_p"),
    Setup("gmpo", "losses packs"),
    Setup("ppo", "critic verl", 32, 1),
    Setup("ppo", "critic tools gradients", 32, 1),
    Setup("reinforce_pp", "kl", 16, 2),
    Setup("reinforce_pp", "ages losses temperature", 8, 4),
)
NAMES = {
    "trl": {
        "response_mask": "completion_mask",
        "old_log_probs": "old_per_token_logps",
        "rollout_log_probs": "sampling_per_token_logps",
        "ref_log_probs": "ref_per_token_logps",
    },
    "verl": {
        "old_log_probs": "old_log_probs",
        "ref_log_probs": "ref_log_prob",
        "group_ids": "uid",
        "rewards": "token_level_rewards",
        "entropies": "entropys",
    },
}


def drawn(generator: torch.Generator, rows: int) -> Tensor:
    """Logits (B, T, V) of flat and peaked positions; specials are not drawn."""
    z = torch.randn(rows, WIDTH, VOCAB, generator=generator, dtype=torch.float64)
    z = z * (0.5 + 3 * torch.rand(rows, WIDTH, 1, generator=generator, dtype=torch.float64))
    z[..., : TOOL + 1] = -30.0
    return z


def kept_by(logits: Tensor, top_p: float) -> Tensor:
    """The nucleus: the fewest tokens whose probability is at least top_p."""
    p, order = logits.softmax(-1).sort(-1, descending=True)
    inside = p.cumsum(-1) - p < top_p
    return torch.zeros_like(inside).scatter(-1, order, inside)


def log_softmax(logits: Tensor, kept: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.where(kept, logits / temperature, -torch.inf).log_softmax(-1)


@dataclass
class World:
    """What a bug may compute anew: logits of each policy, kept sets, the tokens drawn."""

    setup: Setup
    generator: torch.Generator
    logits: dict[str, Tensor]
    kept: Tensor
    temperature: float
    ids: Tensor

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def log_probs(self, logits: Tensor, *, temperature: float | None = None, whole: bool = False) -> Tensor:
        kept = torch.ones_like(self.kept) if whole else self.kept
        x = log_softmax(logits, kept, self.temperature if temperature is None else temperature)
        return x.gather(-1, self.ids[..., None])[..., 0].float()


def spec_of(setup: Setup) -> Algorithm:
    return PRESETS[setup.preset]()


def make(setup: Setup, seed: int) -> tuple[dict[str, Tensor], World]:
    """A right step, under the names of this library, and the world that it is from."""
    generator = torch.Generator().manual_seed(seed)
    rows = setup.groups * setup.size
    z = drawn(generator, rows)
    lengths = torch.randint(5, WIDTH + 4, (rows,), generator=generator).clamp(max=WIDTH)
    column = torch.arange(WIDTH)
    attended = column < lengths[:, None]
    stopped = lengths < WIDTH
    ends = (column == lengths[:, None] - 1) & stopped[:, None]
    z[ends] = z[ends].index_fill(-1, torch.tensor([END]), 4.0)
    tools = torch.zeros_like(attended)
    if "tools" in setup:
        begin = torch.randint(1, 6, (rows, 1), generator=generator)
        tools = (column >= begin) & (column < begin + 3) & (column < lengths[:, None] - 1)
    age = torch.randint(0, 4, (rows,), generator=generator) if "ages" in setup else torch.zeros(rows, dtype=torch.int64)
    temperature = 0.8 if "temperature" in setup else 1.0

    def near(x: Tensor, by: float | Tensor) -> Tensor:
        return x + by * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    logits = {"old_log_probs": z, "rollout_log_probs": near(z, 0.004 + 0.06 * age.double()[:, None, None])}
    logits |= {"log_probs": near(z, 0.12), "ref_log_probs": near(z, 0.3)}
    if "first" in setup:
        logits["log_probs"] = z
    sampler = logits["rollout_log_probs"]
    kept = kept_by(sampler / temperature, 0.9 if "top_p" in setup else 2.0)
    p = log_softmax(sampler, kept, temperature).exp()
    ids = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(rows, WIDTH)
    ids = torch.where(
        ends, END, torch.where(tools, torch.randint(TOOL + 1, VOCAB, ids.shape, generator=generator), ids)
    )
    kept = kept.scatter(-1, ids[..., None], True)
    world = World(setup, generator, logits, kept, temperature, ids)
    mask = attended & ~tools
    data = {name: world.log_probs(x) for name, x in logits.items()}
    data["rollout_log_probs"] = torch.where(mask, data["rollout_log_probs"], 0.0)
    within = log_softmax(z, kept, temperature)
    data["entropies"] = -(within.exp() * within.clamp(min=-99)).sum(-1).float()
    if "top_p" in setup:
        data["kept_counts"] = torch.where(mask, kept.sum(-1), 0).int()
    data |= {"response_mask": mask, "responses": torch.where(attended, ids, PAD)}
    data |= {"group_ids": torch.arange(rows) // setup.size, "ended": torch.where(stopped, Ended.STOP, Ended.LENGTH)}
    if "tools" in setup:
        data["observation_mask"] = tools
    if "ages" in setup:
        data["weights_version"] = 7 - age
    if "packs" in setup:
        data |= {"packs": torch.arange(rows) // 4, "pack_position": torch.arange(rows) % 4}
    data["micro_batches"] = torch.randperm(rows, generator=generator) // 8
    if "first" in setup:
        data["updates_before"] = torch.tensor(0)
    prompts(data, setup, generator, attended)
    outcomes(data, setup, generator)
    results(data, setup)
    if "overlong" in setup:  # they count in their group, and learn nothing
        data["response_mask"] = mask & stopped[:, None]
        data["advantages"] = data["advantages"] * stopped[:, None]
        learn(data, setup)
    return data, world


def prompts(data: dict[str, Tensor], setup: Setup, generator: torch.Generator, attended: Tensor) -> None:
    """Prompts of 3 to 8 tokens, one per group, padded on the left."""
    size = torch.randint(3, PROMPT + 1, (setup.groups, 1), generator=generator)
    ids = torch.randint(TOOL + 1, VOCAB, (setup.groups, PROMPT), generator=generator)
    place = torch.arange(PROMPT) - (0 if "right" in setup else PROMPT - size)
    there = (place >= 0) & (place < size)
    ids = torch.where(place == 0, BEGIN, torch.where(there, ids, PAD))
    repeated, there = (x.repeat_interleave(setup.size, 0) for x in (ids, there))
    data["prompts"] = repeated
    data["attention_mask"] = torch.cat([there, attended], 1).long()
    data["input_ids"] = torch.cat([repeated, data["responses"]], 1)
    data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)


def outcomes(data: dict[str, Tensor], setup: Setup, generator: torch.Generator) -> None:
    rows, mask = len(data["response_mask"]), data["response_mask"]
    difficulty = (0.2 + 0.6 * torch.rand(setup.groups, generator=generator)).repeat_interleave(setup.size)
    data["scores"] = (torch.rand(rows, generator=generator) < difficulty).float()
    if "real" in setup:
        data["scores"] = data["scores"] * 0.7 + 0.3 * torch.rand(rows, generator=generator)
    if {"verl", "critic"} & set(setup.options.split()) or setup.preset == "reinforce_pp":
        data["rewards"] = at_last_token(data["scores"], mask)
        if "kl" in setup and "ref_log_probs" in data:
            kl = (data["old_log_probs"] - data["ref_log_probs"]) * mask
            data["rewards"] = data["rewards"] - 0.01 * kl
    if "critic" in setup:
        values = 0.5 + 0.1 * torch.randn(mask.shape, generator=generator)
        data["values"] = values * mask


def results(data: dict[str, Tensor], setup: Setup) -> None:
    """Advantages, and losses or gradients, by the library."""
    spec, mask = spec_of(setup), data["response_mask"]
    inputs = {"rewards": at_last_token(data["scores"], mask), **data}
    raw = spec.advantage.per_token(inputs, mask)
    data["advantages"] = raw
    if "critic" in setup:
        data["returns"] = (raw + data["values"]) * mask
    if spec.normalization is not None:
        data["advantages"] = spec.normalization.per_token({**inputs, "advantages": raw}, mask)
    learn(data, setup)


def learn(data: dict[str, Tensor], setup: Setup, change: Any = None) -> None:
    """What the step's objective computes; ``change`` of the objective is a bug."""
    spec = spec_of(setup)
    batch = {name: x for name, x in data.items() if name not in ("losses", "gradients", "loss")}
    if "losses" in setup:
        data["losses"] = algorithms.policy_losses(spec, batch).detach()
        data["loss"] = spec.aggregation({**batch, "losses": data["losses"]})
    if "gradients" in setup:
        log_probs = data["log_probs"].clone().requires_grad_()
        objective = algorithms.policy_objective(spec, {**batch, "log_probs": log_probs})
        if change is not None:
            objective = change(objective, {**batch, "log_probs": log_probs})
        data["gradients"] = torch.autograd.grad(objective, log_probs)[0]


def named(data: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
    """Under the names of the library that the setup says."""
    words = next((NAMES[name] for name in NAMES if name in setup), {})
    found = {words.get(name, name): x for name, x in data.items()}
    if "wide" in setup:
        found = widened(found)
    return found


def widened(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-token columns over prompt and response."""
    width = data["response_mask"].shape
    return {
        name: torch.cat([x.new_zeros(len(x), PROMPT), x], 1) if x.shape == width and name != "responses" else x
        for name, x in data.items()
    }
