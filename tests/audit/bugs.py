"""Bugs that trainers had, each planted in a right step by a small function.

``BUGS`` has for each: what it is, the code that should find it, the setup of the right step, and the function, which
changes the columns in place or returns others. Sources of many: tests/regressions/README.md and docs/peers.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims import losses
from rlprims.ended import Ended
from rlprims.layout import last_token
from rlprims.ratios import estimate_kl
from tests.audit.steps import BEGIN, END, PAD, PROMPT, VOCAB, Setup, World, kept_by, learn, make, named, results

Data = dict[str, Tensor]
PLAIN, WIDE, TOOLS = Setup("grpo", "kl"), Setup("dr_grpo", "wide"), Setup("grpo", "tools")
GRADIENTS, LOSSES = Setup("grpo", "gradients"), Setup("grpo", "losses")
COLD, NUCLEUS, AGES = Setup("grpo", "temperature"), Setup("grpo", "top_p"), Setup("grpo", "ages")
TRL, VERL, CRITIC = Setup("rloo", "trl"), Setup("grpo", "verl"), Setup("ppo", "critic", 32, 1)


class Bug(NamedTuple):
    what: str
    code: str
    setup: Setup
    plant: Callable[[Data, World], Data | None]


BUGS: list[Bug] = []


def bug(code: str, what: str, *setups: Setup) -> Callable[[Any], Any]:
    def add(plant: Callable[[Data, World], Data | None]) -> Any:
        BUGS.extend(Bug(what, code, setup, plant) for setup in setups or (PLAIN,))
        return plant

    return add


def planted(each: Bug, seed: int) -> Data:
    data, world = make(each.setup, seed)
    changed = each.plant(data, world)
    return named(data if changed is None else changed, each.setup)


def without(data: Data, *names: str) -> Data:
    return {name: x for name, x in data.items() if name not in names}


def late(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (1, 0))[:, :-1]


def early(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 1))[:, 1:]


def wide(data: Data) -> Data:
    """Per-token columns over prompt and response, for a mask that has to be changed there."""
    return named({**data, "responses": data["responses"]}, WIDE)


# ---------------------------------------------------------------- masks


@bug("M1", "the mask is one token late", PLAIN, TRL)
def _(data: Data, world: World) -> None:
    data["response_mask"] = late(data["response_mask"])


@bug("M1", "the mask is one token early: the prompt's last token is learned")
def _(data: Data, world: World) -> Data:
    data = wide(data)
    data["response_mask"] = early(data["response_mask"])
    return data


@bug("M1", "around tool calls the mask is one token late", TOOLS)
def _(data: Data, world: World) -> Data:
    data["response_mask"] = late(data["response_mask"])
    return without(data, "prompts", "input_ids", "attention_mask", "observation_mask")


@bug("M2", "response_mask is attention_mask")
def _(data: Data, world: World) -> Data:
    data = wide(data)
    data["response_mask"] = data["attention_mask"].bool()
    return data


@bug("M2", "the last two tokens of the prompt are learned")
def _(data: Data, world: World) -> Data:
    data = wide(data)
    data["response_mask"][:, PROMPT - 2 : PROMPT] = True
    return data


@bug("M3", "tool output is learned", TOOLS, Setup("rloo", "tools wide"))
def _(data: Data, world: World) -> None:
    data["response_mask"] = data["response_mask"] | data["observation_mask"]


@bug("M4", "the whole width is learned")
def _(data: Data, world: World) -> None:
    data["response_mask"] = torch.ones_like(data["response_mask"])


@bug("M4", "two tokens of padding are learned, as `ids != pad` with another pad", VERL)
def _(data: Data, world: World) -> None:
    mask = data["response_mask"]
    data["response_mask"] = mask | late(mask) | late(late(mask))


@bug("M5", "a forced `<think>` is learned")
def _(data: Data, world: World) -> None:
    data["rollout_log_probs"][:, 0], data["old_log_probs"][:, 0] = 0.0, -2.0


@bug("M5", "tool output is learned, and nothing says where it is", TOOLS)
def _(data: Data, world: World) -> Data:
    data["response_mask"] = data["response_mask"] | data["observation_mask"]
    return without(data, "observation_mask")


@bug("M5", "a forced end of thinking is learned")
def _(data: Data, world: World) -> None:
    data["rollout_log_probs"][:, 3], data["old_log_probs"][:, 3] = 0.0, -4.0


@bug("M6", "the end token is not learned", PLAIN, TRL, Setup("dapo", "top_p"))
def _(data: Data, world: World) -> None:
    data["response_mask"] = data["response_mask"] & (data["responses"] != END)


@bug("M6", "the padding is the end token, and the mask is `ids != pad`")
def _(data: Data, world: World) -> Data:
    data["responses"] = torch.where(data["responses"] == PAD, END, data["responses"])
    data["input_ids"] = torch.cat([data["prompts"], data["responses"]], 1)
    data["response_mask"] = data["responses"] != END
    return without(data, "rollout_log_probs")


@bug("M7", "every response that was cut off gets an end token", PLAIN, Setup("grpo", "trl", 16, 4))
def _(data: Data, world: World) -> None:
    cut = data["ended"] == Ended.LENGTH
    data["responses"][cut, -1] = END
    data["input_ids"] = torch.cat([data["prompts"], data["responses"]], 1)


def _two_begins(data: Data) -> None:
    at = (data["prompts"] == BEGIN).nonzero()
    longer = torch.cat([torch.zeros_like(data["prompts"][:, :1]), data["prompts"]], 1)
    longer[at[:, 0], at[:, 1]] = BEGIN
    there = torch.cat([longer != PAD, data["attention_mask"][:, PROMPT:].bool()], 1)
    data |= {"prompts": longer, "attention_mask": there.long()}
    data["input_ids"] = torch.cat([longer, data["responses"]], 1)
    data["position_ids"] = (there.cumsum(1) - 1).clamp(min=0)


@bug("M8", "the begin token twice", PLAIN, VERL)
def _(data: Data, world: World) -> None:
    _two_begins(data)


@bug("M8", "the begin token twice, seen in prompts and responses")
def _(data: Data, world: World) -> Data:
    _two_begins(data)
    return without(data, "input_ids")


@bug("M9", "the text was tokenized again: tokens differ", PLAIN, VERL)
def _(data: Data, world: World) -> None:
    data["input_ids"][::3, PROMPT + 2] = 4 + (data["input_ids"][::3, PROMPT + 2] + 1) % (VOCAB - 4)


@bug("M9", "the trainer reads ids moved by one")
def _(data: Data, world: World) -> None:
    data["input_ids"][:, PROMPT:] = late(data["responses"])


@bug("M10", "only what follows the tool call is learned", TOOLS)
def _(data: Data, world: World) -> None:
    after = data["observation_mask"].cumsum(1) > 0
    data["response_mask"] = data["response_mask"] & (after | ~data["observation_mask"].any(1, keepdim=True))


@bug("M10", "the first two tokens of each response are not learned")
def _(data: Data, world: World) -> None:
    data["response_mask"][:, :2] = False


# ---------------------------------------------------------------- groups


def _regrouped(data: Data, world: World, ids: Tensor) -> None:
    data["group_ids"] = ids
    results(data, world.setup)


@bug("G1", "`repeat` in the place of `repeat_interleave`", PLAIN, VERL)
def _(data: Data, world: World) -> None:
    _regrouped(data, world, torch.arange(32) % 8)


@bug("G1", "rows were moved, and their ids stayed")
def _(data: Data, world: World) -> None:
    order = torch.randperm(32, generator=world.generator)
    _regrouped(data, world, data["group_ids"][order])


@bug("G1", "two prompts in one group")
def _(data: Data, world: World) -> None:
    _regrouped(data, world, torch.arange(32) // 8)


@bug("G2", "rollouts that failed are dropped alone", PLAIN, Setup("rloo", "", 16, 4))
def _(data: Data, world: World) -> Data:
    rows = len(data["scores"])
    kept = torch.tensor([row not in (1, 6, 7) for row in range(rows)])
    less = {name: x[kept] for name, x in data.items() if len(x) == rows}
    results(less, world.setup)
    return less


@bug("G3", "an id for each sample and not for its prompt")
def _(data: Data, world: World) -> Data:
    data["group_ids"] = torch.arange(32)
    return without(data, "advantages")


def _copied(data: Data, source: int, target: int) -> None:
    for name, x in data.items():
        if name not in ("group_ids", "prompts", "input_ids", "attention_mask", "position_ids", "micro_batches"):
            x[target] = x[source]
    data["attention_mask"][target, PROMPT:] = data["attention_mask"][source, PROMPT:]
    data["input_ids"][target, PROMPT:] = data["responses"][target]
    data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)


@bug("G4", "two workers with one seed", PLAIN, Setup("dapo", ""))
def _(data: Data, world: World) -> None:
    longest = data["response_mask"].sum(1).view(8, 4).argmax(1)
    for group in range(8):
        source = 4 * group + int(longest[group])
        _copied(data, source, 4 * group + (int(longest[group]) + 1) % 4)
    results(data, world.setup)


@bug("G4", "one rollout stands twice in the batch")
def _(data: Data, world: World) -> None:
    source = int(data["response_mask"].sum(1).argmax())
    _copied(data, source, source ^ 1)
    results(data, world.setup)


# ---------------------------------------------------------------- advantages and rewards


def _advantages(data: Data, rows: Tensor) -> None:
    data["advantages"] = rows.float()[:, None] * data["response_mask"]


@bug("A1", "no baseline")
def _(data: Data, world: World) -> None:
    scores = data["scores"].view(8, 4)
    _advantages(data, (scores / (scores.std(1, keepdim=True) + 1e-4)).flatten())


@bug("A1", "the best of the group as baseline")
def _(data: Data, world: World) -> None:
    scores = data["scores"].view(8, 4)
    _advantages(data, (scores - 1.5 * scores.amax(1, keepdim=True)).flatten())


@bug("A1", "the mean over half of the group")
def _(data: Data, world: World) -> None:
    data["scores"] += 0.1 * torch.rand(32, generator=world.generator)
    scores = data["scores"].view(8, 4)
    _advantages(data, ((scores - scores[:, :2].mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten())


@bug("A1", "a fixed baseline", Setup("grpo", "real"))
def _(data: Data, world: World) -> None:
    _advantages(data, data["scores"] - 0.3)


@bug("A1", "the weights were clipped from above after centring", Setup("grpo", "real"))
def _(data: Data, world: World) -> None:
    data["advantages"] = data["advantages"].clamp(max=0.4)


def _by_part(data: Data, ids: Tensor) -> None:
    rows = torch.zeros(32)
    for part in ids.unique():
        at = ids == part
        rows[at] = (data["scores"][at] - data["scores"][at].mean()) / (data["scores"][at].std() + 1e-6)
    _advantages(data, rows)


@bug("A2", "statistics of the batch", Setup("grpo", "real"), PLAIN)
def _(data: Data, world: World) -> None:
    _by_part(data, torch.zeros(32))


@bug("A2", "statistics of a micro-batch", Setup("grpo", "real"), PLAIN)
def _(data: Data, world: World) -> None:
    _by_part(data, data["micro_batches"])


@bug("A2", "statistics of a rank", Setup("grpo", "real"))
def _(data: Data, world: World) -> None:
    data["ranks"] = torch.randperm(32, generator=world.generator) % 2
    _by_part(data, data["ranks"])


@bug("A3", "the advantages have the wrong sign", PLAIN, TRL, Setup("dr_grpo", "real"))
def _(data: Data, world: World) -> None:
    data["advantages"] = -data["advantages"]


@bug("A3", "scores of other rows", Setup("grpo", "real", 16, 4), Setup("rloo", "", 16, 8))
def _(data: Data, world: World) -> None:
    data["scores"] = data["scores"][torch.randperm(len(data["scores"]), generator=world.generator)]


@bug("A3", "rows were sorted by length after scoring", Setup("grpo", "real", 16, 4))
def _(data: Data, world: World) -> None:
    order = data["response_mask"].sum(1).argsort()
    _advantages(data, data["advantages"].amax(1)[order] + data["advantages"].amin(1)[order])


def _of_constant(data: Data, world: World, noise: float) -> None:
    data["scores"][:4] = 0.7
    data["scores"][4:8] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    results(data, world.setup)
    data["advantages"][:4] = noise * data["response_mask"][:4]


@bug("A4", "equal rewards of 0.7 get 0.056, as in verl and SkyRL", PLAIN, Setup("dr_grpo", ""))
def _(data: Data, world: World) -> None:
    _of_constant(data, world, 0.056)


@bug("A4", "with an eps of 1e-9 they get 0.9, as in OpenRLHF")
def _(data: Data, world: World) -> None:
    _of_constant(data, world, 0.9)


@bug("A5", "the loss without its minus sign", GRADIENTS, Setup("dapo", "gradients"), Setup("cispo", "gradients"))
def _(data: Data, world: World) -> None:
    data["gradients"] = -data["gradients"]


REWARDED = Setup("ppo", "critic", 8, 4)


def _rewarded(data: Data, where: Tensor) -> Data:
    data["rewards"] = torch.where(where, 0.5 + data["scores"][:, None], 0.0)
    return without(data, "advantages", "returns", "values")


@bug("R1", "the reward is in the last column", REWARDED)
def _(data: Data, world: World) -> Data:
    return _rewarded(data, torch.arange(28).expand(32, 28) == 27)


@bug("R1", "the reward is on the first token", REWARDED)
def _(data: Data, world: World) -> Data:
    return _rewarded(data, torch.arange(28).expand(32, 28) == 0)


@bug("R1", "the reward is one token before the last", REWARDED)
def _(data: Data, world: World) -> Data:
    return _rewarded(data, early(last_token(data["response_mask"])))


# ---------------------------------------------------------------- log-probs


def _trainer(data: Data, world: World, **changes: Any) -> None:
    data["old_log_probs"] = world.log_probs(world.logits["old_log_probs"], **changes)


@bug("L1", "the trainer does not divide by the temperature", COLD, Setup("maxrl", "temperature top_p"))
def _(data: Data, world: World) -> None:
    _trainer(data, world, temperature=1.0)


@bug("L1", "the trainer divides by the temperature twice", COLD)
def _(data: Data, world: World) -> None:
    _trainer(data, world, temperature=0.64)


@bug("L1", "the trainer multiplies by the temperature", COLD)
def _(data: Data, world: World) -> None:
    _trainer(data, world, temperature=1 / 0.8)


@bug("L1", "the sampler's log-probs are those before the temperature, as vLLM's default", COLD)
def _(data: Data, world: World) -> None:
    x = world.log_probs(world.logits["rollout_log_probs"], temperature=1.0)
    data["rollout_log_probs"] = torch.where(data["response_mask"], x, 0.0)


@bug("L1", "a temperature of 0.95 is forgotten")
def _(data: Data, world: World) -> None:
    _trainer(data, world, temperature=0.95)


def _sampler(data: Data, world: World, logits: Tensor) -> None:
    x = world.log_probs(logits)
    data["rollout_log_probs"] = torch.where(data["response_mask"], x, 0.0)


@bug("L2", "top_p of 0.9, scored over the whole vocabulary (trl#6789)", NUCLEUS, Setup("gspo", "ages top_p", 4, 16))
def _(data: Data, world: World) -> None:
    _trainer(data, world, whole=True)


def _within(data: Data, world: World, kept: Tensor) -> None:
    world.kept = kept.scatter(-1, world.ids[..., None], True)
    _sampler(data, world, world.logits["rollout_log_probs"])


@bug("L2", "top_k of 8, scored over the whole vocabulary")
def _(data: Data, world: World) -> None:
    z = world.logits["rollout_log_probs"]
    _within(data, world, z >= z.topk(8, dim=-1).values[..., -1:])


@bug("L2", "min_p of 0.05, scored over the whole vocabulary")
def _(data: Data, world: World) -> None:
    p = world.logits["rollout_log_probs"].softmax(-1)
    _within(data, world, p >= 0.05 * p.amax(-1, keepdim=True))


@bug("L2", "top_p of 0.97, scored over the whole vocabulary")
def _(data: Data, world: World) -> None:
    _within(data, world, kept_by(world.logits["rollout_log_probs"], 0.97))


def _aged(data: Data, world: World, by: float) -> Tensor:
    """The policy has moved since the tokens were drawn."""
    age = torch.arange(32) % 4
    for name in ("old_log_probs", "log_probs"):
        z = world.logits[name]
        data[name] = world.log_probs(z + by * age[:, None, None] * world.normal(*z.shape))
    return age


@bug("L3", "weights are sent too rarely")
def _(data: Data, world: World) -> None:
    data["weights_version"] = 9 - _aged(data, world, 0.5)


@bug("L3", "weights are sent too rarely, and versions are per token")
def _(data: Data, world: World) -> None:
    age = _aged(data, world, 0.5)
    data["versions"] = (9 - age)[:, None] * data["response_mask"]


@bug("L3", "an asynchronous run, which may be meant", Setup("rloo", ""))
def _(data: Data, world: World) -> None:
    data["weights_version"] = 9 - _aged(data, world, 0.1)


@bug("L4", "the sampler's layers are quantized to 8 bits")
def _(data: Data, world: World) -> None:
    z = world.logits["old_log_probs"]
    data["old_log_probs"] = world.log_probs(z + 0.15 * world.normal(*z.shape))


@bug("L4", "the output layer is in another precision")
def _(data: Data, world: World) -> None:
    noise = (0.08 * world.normal(*data["old_log_probs"].shape)).float()
    data["old_log_probs"] = (data["old_log_probs"] + noise).clamp(max=-1e-4)


@bug("L5", "the trainer's log-probs are of the next token", PLAIN, TRL)
def _(data: Data, world: World) -> Data:
    data["old_log_probs"] = early(data["old_log_probs"])
    return without(data, "log_probs")


@bug("L5", "the sampler's log-probs are of the token before", PLAIN, Setup("gspo", ""))
def _(data: Data, world: World) -> None:
    data["rollout_log_probs"] = late(data["rollout_log_probs"]) - 1e-3 * data["response_mask"]


@bug("L5", "the reference's log-probs are of the next token")
def _(data: Data, world: World) -> None:
    data["ref_log_probs"] = early(data["ref_log_probs"])


@bug("L5", "the updated log-probs are of the token before")
def _(data: Data, world: World) -> None:
    data["log_probs"] = late(data["log_probs"])


@bug("L6", "the generation prompt is missing in the trainer's template", PLAIN, VERL)
def _(data: Data, world: World) -> None:
    z = world.logits["old_log_probs"].clone()
    z[:, 0] += 1.5 * world.normal(*z[:, 0].shape)
    data["old_log_probs"] = world.log_probs(z)


@bug("L6", "a space between prompt and response")
def _(data: Data, world: World) -> None:
    data["old_log_probs"][:, 0] -= 0.7


def _disturbed(data: Data, world: World, size: Tensor) -> None:
    z = world.logits["old_log_probs"]
    data["old_log_probs"] = world.log_probs(z + size[:, None, None] * world.normal(*z.shape))


@bug("L7", "positions count padding", Setup("grpo", "", 16, 4), Setup("dapo", "", 16, 4))
def _(data: Data, world: World) -> None:
    padding = (data["attention_mask"].cumsum(1) == 0).sum(1)
    _disturbed(data, world, 0.15 * padding.double())


@bug("L7", "padding is attended to", Setup("grpo", "", 16, 4))
def _(data: Data, world: World) -> None:
    padding = (data["attention_mask"].cumsum(1) == 0).sum(1)
    _disturbed(data, world, 0.4 * (padding > 0).double())


@bug("L8", "later rows of a pack read the earlier ones", Setup("grpo", "packs"), Setup("gmpo", "packs"))
def _(data: Data, world: World) -> None:
    _disturbed(data, world, 0.5 * (data["pack_position"] > 0).double())


@bug("L8", "positions run on in a pack", Setup("grpo", "packs"))
def _(data: Data, world: World) -> None:
    _disturbed(data, world, 0.3 * data["pack_position"].double())


@bug("L9", "dropout is on in the update", Setup("grpo", "first"), Setup("rloo", "real verl first"))
def _(data: Data, world: World) -> None:
    z = world.logits["old_log_probs"]
    data["log_probs"] = world.log_probs(z + 0.1 * world.normal(*z.shape))


@bug("L9", "old_log_probs are kept in 8 bits", Setup("grpo", "first"))
def _(data: Data, world: World) -> None:
    data["old_log_probs"] = data["old_log_probs"].to(torch.float8_e4m3fn).float()


@bug("L10", "losses in the place of log-probs", PLAIN)
def _(data: Data, world: World) -> None:
    data["old_log_probs"] = -data["old_log_probs"]


@bug("L10", "probabilities in the place of log-probs")
def _(data: Data, world: World) -> None:
    data["ref_log_probs"] = data["ref_log_probs"].exp()


@bug("L10", "logits in the place of log-probs")
def _(data: Data, world: World) -> None:
    z = world.logits["log_probs"]
    data["log_probs"] = z.gather(-1, world.ids[..., None])[..., 0].float()


@bug("L11", "the entropy is that of the whole vocabulary", NUCLEUS, Setup("maxrl", "temperature top_p"))
def _(data: Data, world: World) -> None:
    p = world.logits["old_log_probs"].softmax(-1)
    data["entropies"] = -(p * p.log()).sum(-1).float()


@bug("L11", "the entropy without its minus sign")
def _(data: Data, world: World) -> None:
    data["entropies"] = -data["entropies"]


@bug("L12", "old_log_probs are computed anew before each update")
def _(data: Data, world: World) -> None:
    data |= {"old_log_probs": data["log_probs"], "rollout_log_probs": data["log_probs"] * data["response_mask"]}
    data["updates_before"] = torch.tensor(3)


@bug("L13", "the sampler's rows are in another order", PLAIN, Setup("cispo", ""))
def _(data: Data, world: World) -> Data:
    order = torch.randperm(32, generator=world.generator)
    return without({**data, "rollout_log_probs": data["rollout_log_probs"][order]}, "attention_mask")


@bug("L13", "another model's log-probs")
def _(data: Data, world: World) -> None:
    z = world.logits["old_log_probs"]
    data["old_log_probs"] = world.log_probs(z[torch.randperm(32, generator=world.generator)])
    data["log_probs"] = data["old_log_probs"]


@bug("L13", "old and updated log-probs of other rows")
def _(data: Data, world: World) -> Data:
    order = (torch.arange(32) + 5) % 32
    return without({**data, "log_probs": data["log_probs"][order]}, "rollout_log_probs")


# ---------------------------------------------------------------- the reference


def _k(data: Data, kind: Any, sign: float = 1.0) -> Tensor:
    return estimate_kl(sign * (data["old_log_probs"] - data["ref_log_probs"]), kind)


@bug("K1", "k3 below 0")
def _(data: Data, world: World) -> None:
    data["kl"] = -_k(data, "k3")


@bug("K1", "k1 of reference and policy")
def _(data: Data, world: World) -> None:
    data["kl"] = _k(data, "k1", -1.0)


@bug("K1", "k3 of reference and policy", PLAIN, TRL)
def _(data: Data, world: World) -> None:
    data["kl"] = _k(data, "k3", -1.0)


@bug("K1", "k2 below 0")
def _(data: Data, world: World) -> None:
    data["kl"] = -_k(data, "k2")


@bug("K1", "a KL is taken off the loss", Setup("dapo", "gradients"))
def _(data: Data, world: World) -> None:
    def change(objective: Tensor, batch: Data) -> Tensor:
        mask = batch["response_mask"]
        return objective - 0.05 * losses.token_mean(losses.kl(batch["log_probs"], batch["ref_log_probs"], mask), mask)

    learn(data, world.setup, change)


@bug("K2", "the reference shares the policy's weights", PLAIN, Setup("dapo", ""))
def _(data: Data, world: World) -> None:
    data["ref_log_probs"] = data["log_probs"].clone()


# ---------------------------------------------------------------- numbers


@bug("N1", "a score is NaN")
def _(data: Data, world: World) -> None:
    data["scores"][5] = torch.nan


@bug("N1", "a sampled token has log-prob -inf")
def _(data: Data, world: World) -> None:
    data["log_probs"][3, 1] = -torch.inf


@bug("N1", "a group has the advantage NaN: 0 / 0")
def _(data: Data, world: World) -> None:
    data["advantages"][8:12] = torch.nan


@bug("N1", "a value is infinite", CRITIC)
def _(data: Data, world: World) -> None:
    data["values"][2, 0] = torch.inf


def _per_part(data: Data, world: World, ids: Tensor) -> tuple[Tensor, Tensor]:
    """GRPO's losses, and the mean over parts of their own token means."""
    ratio = (data["log_probs"] - data["old_log_probs"]).exp()
    a, mask = data["advantages"], data["response_mask"]
    per_token = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask
    means = [per_token[ids == part].sum() / mask[ids == part].sum() for part in ids.unique()]
    return per_token, torch.stack(means).mean()


@bug("N2", "a mean over micro-batches of their means (trl#7206)", GRADIENTS)
def _(data: Data, world: World) -> None:
    new = {**data, "log_probs": data["log_probs"].clone().requires_grad_()}
    _, loss = _per_part(new, world, data["micro_batches"])
    data["gradients"] = torch.autograd.grad(loss, new["log_probs"])[0]


@bug("N2", "a mean over ranks of their means", GRADIENTS)
def _(data: Data, world: World) -> Data:
    data["ranks"] = torch.arange(32) // 8
    data["losses"], data["loss"] = _per_part(data, world, data["ranks"])
    return without(data, "gradients", "micro_batches")


@bug("N3", "divided by four micro-batches twice", GRADIENTS)
def _(data: Data, world: World) -> None:
    data["gradients"] = data["gradients"] / 4


@bug("N3", "the means of eight micro-batches are added", Setup("dapo", "gradients"))
def _(data: Data, world: World) -> None:
    data["gradients"] = data["gradients"] * 8


@bug("N3", "divided by the tokens of another batch (TRL 1.16's dapo)", Setup("dapo", "gradients"))
def _(data: Data, world: World) -> None:
    data["gradients"] = data["gradients"] * 0.9785


@bug("N4", "the KL term has no mask", GRADIENTS)
def _(data: Data, world: World) -> None:
    learn(data, world.setup, lambda objective, batch: objective + 0.01 * (batch["log_probs"] ** 2).mean())


@bug("N4", "tool output has a gradient", Setup("ppo", "critic tools gradients", 32, 1))
def _(data: Data, world: World) -> None:
    data["gradients"] = torch.where(data["observation_mask"], 1e-4, data["gradients"])
