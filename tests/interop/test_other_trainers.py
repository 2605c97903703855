"""``examples/other_trainers.py``: the steps of each trainer, as its files divide and add, are the algorithm's step.

The stand-ins have the interface of prime-rl 559b4477 (trainer/rl/loss.py: LossInputs, compute_loss), SkyRL a9564572
(skyrl_train/utils/ppo_utils.py: apply_loss_reduction_to_advantages_minibatch), NeMo-RL 7ea279ab
(algorithms/loss/interfaces.py) and slime 624b824a (megatron_utils/loss.py, cp_utils.py).
"""

import enum
import math
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.other_trainers import NeMoRL, PrimeRL, SkyRL, Slime
from rlprims import algorithms, corrections, losses
from rlprims.algorithms import Algorithm, policy_objective, token_weights, use

Data = dict[str, Tensor]
LENGTHS = (5, 1, 3, 2, 4, 2)
SPLITS = ([range(6)], [range(3), range(3, 6)], [[0], [5, 1], [2, 3, 4]], [[i] for i in range(6)])


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = field(default=None)


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass
class OffPolicyCorrectionConfig:
    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0


@dataclass
class AlgorithmConfig:
    loss_reduction: str = "token_mean"
    max_seq_len: int | None = None
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGPROB = "logprob"


def sent(loss: Any) -> Any:
    """What a worker gets."""
    return pickle.loads(pickle.dumps(loss))  # noqa: S301


def log_probs_of(logits: Tensor, *, args: Any, unconcat_tokens: Any, total_lengths: Any, response_lengths: Any) -> Any:
    """The stand-in's logits (1, N, 1) are the log-probs."""
    return None, {"log_probs": list(logits.flatten().split(response_lengths))}


SLIME = {"get_log_probs_and_entropy": log_probs_of, "get_rollout_top_p_logprob_kwargs": lambda args, batch: {}}


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in {
        "prime_rl.trainer.rl.loss": {"LossOutputs": LossOutputs},
        "nemo_rl.algorithms.loss.interfaces": {"LossType": LossType, "LossInputType": LossInputType},
        "slime.backends.megatron_utils.loss": SLIME,
    }.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:i]))
            vars(module).update(members if i == len(parts) else {"__path__": []})
            monkeypatch.setitem(sys.modules, module.__name__, module)


def batch(one_old: bool = False) -> Data:
    """Six rows with tool tokens inside; what is outside of the mask must not be read."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = mask[4, 0] = False
    noise = torch.randn(4, 6, 6, generator=draw, dtype=torch.float64)
    old = -1 + 0.3 * noise[0]
    sampler = old if one_old else old + 0.4 * noise[1]
    rows = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.0, 0.4], dtype=torch.float64)
    data = {"old_log_probs": old, "rollout_log_probs": sampler, "ref_log_probs": old + 0.2 * noise[2]}
    data |= {"log_probs": old + 0.3 * noise[3], "advantages": rows[:, None].expand(6, 6)}
    groups = torch.tensor([0, 0, 1, 0, 1, 1])
    return {name: torch.where(mask, x, torch.nan) for name, x in data.items()} | {
        "response_mask": mask,
        "group_ids": groups,
    }


def rows_of(data: Data, rows: Any) -> Data:
    return {name: x[list(rows)] for name, x in data.items()}


def prime_rl(algorithm: Algorithm, data: Data, parts: Any) -> Tensor:
    """compute_loss of each micro-batch: one call for a sequence, the sums divided by the tokens of all ranks."""
    loss, tokens = PrimeRL(algorithm), data["response_mask"].sum()
    names = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "response_mask")
    sequences = [LossInputs(*(data[name][row] for name in names)) for part in parts for row in part]
    return torch.stack([loss(x).loss / tokens for x in sequences]).sum()


def skyrl(algorithm: Algorithm, data: Data, parts: Any) -> Tensor:
    """Advantages are divided over the mini-batch; the losses of micro-batches and ranks are added."""
    lengths = data["response_mask"].sum(1, keepdim=True)
    rows = len(lengths)
    length = algorithm.aggregation.hyperparameters.get("length")
    reduction = {
        losses.token_mean: ("token_mean", lengths.sum()),
        losses.seq_mean_token_mean: ("sequence_mean", rows * lengths),
        losses.seq_mean_token_sum_norm: ("seq_mean_token_sum_norm", torch.tensor(rows * (length or 1))),
        losses.prompt_token_mean: ("prompt_mean", 2 * torch.tensor([[7], [7], [8], [7], [8], [8]])),
    }[algorithm.aggregation.fn]
    config = AlgorithmConfig(reduction[0], length)
    scaled = data | {"advantages": data["advantages"] / reduction[1]}
    loss = sent(SkyRL(algorithm))
    return torch.stack([
        loss(
            x["log_probs"], x["old_log_probs"], x["advantages"], config=config,
            loss_mask=x["response_mask"].float(), rollout_logprobs=x["rollout_log_probs"],
        )[0]
        for x in (rows_of(scaled, part) for part in parts)
    ]).sum()  # fmt: skip


def nemo_rl(algorithm: Algorithm, data: Data, parts: Any) -> Tensor:
    """Counts of valid sequences and tokens over all ranks; the losses are added. One more row is not a sample."""
    loss = sent(NeMoRL(algorithm))
    names = {"prev_logprobs": "old_log_probs", "generation_logprobs": "rollout_log_probs"}
    names |= {"reference_policy_logprobs": "ref_log_probs", "advantages": "advantages"}

    def micro_batch(part: Any) -> tuple[Any, Tensor]:
        x = rows_of(data, [*part, 0])
        shifted = {theirs: torch.nn.functional.pad(x[ours], (1, 0), value=torch.nan) for theirs, ours in names.items()}
        shifted["token_mask"] = torch.nn.functional.pad(x["response_mask"].float(), (1, 0), value=1.0)
        return shifted | {"sample_mask": torch.tensor([1.0] * len(part) + [0.0])}, x["log_probs"]

    counts = torch.tensor(6.0), data["response_mask"].sum().float()
    return torch.stack([
        loss(data=columns, global_valid_seqs=counts[0], global_valid_toks=counts[1], next_token_logprobs=new)[0]
        for columns, new in map(micro_batch, parts)
    ]).sum()  # fmt: skip


def slime(algorithm: Algorithm, data: Data, parts: Any) -> Tensor:
    """By tokens: sums, divided by the step's tokens; otherwise sums of means, divided by the step's rollouts."""
    by_token = algorithm.aggregation.fn is losses.token_mean
    loss = sent(Slime(algorithm))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        x = [{name: column[:n] for name, column in row.items()} for row, n in unpadded(data, part)]
        denominators = [row["response_mask"].sum().clamp(min=1) for row in x]
        masks, lengths = [row["response_mask"].int() for row in x], [len(row["response_mask"]) for row in x]

        def mean(values: Tensor, masks: Any = masks, lengths: Any = lengths, counts: Any = denominators) -> Tensor:
            divisors = [1] * len(counts) if by_token else counts
            return sum((v * m).sum() / n for v, m, n in zip(values.split(lengths), masks, divisors, strict=True))

        batch = {"log_probs": [row["old_log_probs"].nan_to_num() for row in x], "loss_masks": masks}
        batch |= {name: [row[name].nan_to_num() for row in x] for name in ("rollout_log_probs", "ref_log_probs")}
        batch |= {"advantages": [row["advantages"].nan_to_num() for row in x], "response_lengths": lengths}
        batch |= {"unconcat_tokens": None, "total_lengths": lengths}
        logits = torch.cat([row["log_probs"] for row in x]).nan_to_num()[None, :, None]
        total = total + loss(slime_args(algorithm), batch, logits, mean)[0]
    return total / (data["response_mask"].sum() if by_token else 6)


def slime_args(algorithm: Algorithm, **changes: Any) -> types.SimpleNamespace:
    settings = {"calculate_per_token_loss": algorithm.aggregation.fn is losses.token_mean, "context_parallel_size": 1}
    settings |= {"use_rollout_logprobs": False, "use_tis": False, "entropy_coef": 0.0}
    settings |= {"use_kl_loss": algorithm.name == "grpo"}
    return types.SimpleNamespace(**settings | changes)


def unpadded(data: Data, part: Any) -> Iterator[tuple[Data, int]]:
    for row in part:
        yield {name: x[row] for name, x in data.items() if x.dim() > 1}, LENGTHS[row]


TRAINERS: dict[str, Callable[..., Tensor]] = {"prime-rl": prime_rl, "SkyRL": skyrl, "NeMo-RL": nemo_rl, "slime": slime}
TIS = algorithms.dapo().replace(corrections=[use(corrections.tis, high=1.2)])
KL = algorithms.grpo(kl_coef=0.3)
ONE_POLICY = [
    ("prime-rl", algorithms.dapo(), True),
    ("prime-rl", algorithms.dppo(), True),
    ("prime-rl", algorithms.gspo().replace(aggregation=losses.token_mean), True),
    ("prime-rl", KL.replace(aggregation=losses.token_mean), True),
]
TWO_POLICIES = [
    (trainer, algorithm, False)
    for trainer in ("SkyRL", "NeMo-RL", "slime")
    for algorithm in (TIS, algorithms.dppo(), algorithms.gspo(), algorithms.decoupled_ppo())
]
OTHERS = [
    ("SkyRL", algorithms.dr_grpo(max_length=8), False),
    ("SkyRL", algorithms.dapo().replace(aggregation=losses.prompt_token_mean), False),
    ("NeMo-RL", algorithms.dr_grpo(max_length=8), False),
    ("NeMo-RL", KL, False),
    ("slime", KL, False),
    ("slime", KL.replace(aggregation=losses.token_mean), False),
]


@pytest.mark.parametrize("parts", SPLITS, ids=["whole", "halves", "uneven", "single"])
@pytest.mark.parametrize(("trainer", "algorithm", "one_old"), ONE_POLICY + TWO_POLICIES + OTHERS)
def test_any_split_adds_up_to_the_step(trainer: str, algorithm: Algorithm, one_old: bool, parts: Any) -> None:
    data = batch(one_old)
    whole = data | {"log_probs": data["log_probs"].clone().requires_grad_()}
    step = policy_objective(algorithm, whole | token_weights(algorithm, whole))
    step.backward()
    split = data | {"log_probs": data["log_probs"].clone().requires_grad_()}
    total = TRAINERS[trainer](algorithm, split, parts)
    total.backward()
    torch.testing.assert_close(total, step, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(split["log_probs"].grad, whole["log_probs"].grad, rtol=1e-6, atol=1e-9)
    assert step != 0


def test_a_weight_of_prime_rl_is_a_factor_of_the_whole_loss_of_its_token() -> None:
    p, q, mask = torch.tensor([0.5, 0.2, 0.6]), torch.tensor([0.4, 0.2, 0.2]), torch.tensor([True, True, False])
    x = LossInputs(p.log(), q.log(), None, torch.tensor([1.0, -2.0, 1.0]), mask, torch.tensor([2.0, 0.5, 9.0]))
    torch.testing.assert_close(PrimeRL(algorithms.dapo())(x).loss, torch.tensor(2.0 * -1.25 + 0.5 * 2.0))


def test_the_metric_that_grpo_train_reads() -> None:
    """NeMo-RL's grpo_train compares ``token_mult_prob_error``, the mean of e^|generation − prev|, with 1.05."""
    data = {
        "token_mask": torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "prev_logprobs": torch.zeros(3, 3),
        "generation_logprobs": torch.full((3, 3), -math.log(2.0)),
        "advantages": torch.tensor([[9.0, 1.0, 1.0], [9.0, -1.0, 9.0], [9.0, 9.0, 9.0]]),
    }
    new = torch.tensor([1.5, 1.0, 0.5, 1.0, 1.0, 1.0]).log().view(3, 2)
    loss = NeMoRL(algorithms.dapo().replace(policy_loss={"clip_high": 0.2}))
    total, metrics = loss(data, torch.tensor(4), torch.tensor(8), next_token_logprobs=new)
    torch.testing.assert_close(total, torch.tensor((-1.2 - 1.0 + 0.8) / 8))  # 1.5 is clipped to 1.2, 0.5 to 0.8
    assert metrics == pytest.approx({"loss": -1.4 / 8, "token_mult_prob_error": 3 * 2 / 8, "num_valid_samples": 2.0})
    assert (loss.loss_type, loss.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGPROB)
    assert NeMoRL(algorithms.gspo()).loss_type is LossType.SEQUENCE_LEVEL
    in_reward = algorithms.gspo().replace(kl_in_reward={})
    assert [NeMoRL(each).reference_policy_kl_penalty for each in (KL, algorithms.gspo(), in_reward)] == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="ref_log_probs not: expected top_p 1, top_k null"):
        loss(data | {"curr_logprobs_unfiltered": new}, torch.tensor(4), torch.tensor(8), next_token_logprobs=new)


@pytest.mark.parametrize(
    ("make", "algorithm", "reason"),
    [
        (PrimeRL, algorithms.gspo(), r"its mean is losses.seq_mean_token_mean, expected one of \['token_mean'\]"),
        (PrimeRL, TIS, "it reads rollout_log_probs"),
        (PrimeRL, algorithms.decoupled_ppo(), "it reads rollout_log_probs"),
        (SkyRL, KL, "it reads ref_log_probs"),
        (SkyRL, algorithms.gvpo(), "it reads group_ids"),
        (SkyRL, algorithms.sft(), "the loss of sft is not proportional to them"),
        (SkyRL, algorithms.rloo(), "its mean is losses.seq_mean_token_sum"),
        (NeMoRL, algorithms.clip_cov(), "it selects tokens of a whole update"),
        (NeMoRL, algorithms.echo(), "a term has its own mean or controller"),
        (NeMoRL, algorithms.online_dpo(), "its mean is losses.prompt_token_mean"),
        (Slime, algorithms.dr_grpo(max_length=8), "its mean is losses.seq_mean_token_sum_norm"),
        (Slime, algorithms.high_entropy(), "it reads entropies; it selects tokens"),
    ],
)
def test_what_a_trainer_cannot_compute_is_refused_before_it_starts(make: Any, algorithm: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(algorithm)


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        (algorithms.dapo(), AlgorithmConfig("sequence_mean")),
        (algorithms.gspo(), AlgorithmConfig("token_mean")),
        (algorithms.dr_grpo(max_length=8), AlgorithmConfig("seq_mean_token_sum_norm", 9)),
        (algorithms.dapo(), AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig("token"))),
    ],
)
def test_skyrl_with_other_settings_is_refused(algorithm: Algorithm, config: AlgorithmConfig) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=f"the trainer's settings contradict {algorithm.name}"):
        SkyRL(algorithm)(x, x, x, config=config, loss_mask=x + 1, rollout_logprobs=x)


def test_skyrl_without_log_probs_of_the_sampler_is_refused_for_a_loss_that_reads_them() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"losses.dppo: expected \['rollout_log_probs'\]"):
        SkyRL(algorithms.dppo())(x, x, x, config=AlgorithmConfig(), loss_mask=x + 1)


@pytest.mark.parametrize(
    "setting",
    [
        {"calculate_per_token_loss": False},
        {"context_parallel_size": 2},
        {"use_rollout_logprobs": True},
        {"use_tis": True},
        {"entropy_coef": 0.01},
        {"use_kl_loss": True},
    ],
    ids=str,
)
def test_slime_with_other_settings_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the trainer's settings contradict dapo"):
        Slime(algorithms.dapo())(slime_args(algorithms.dapo(), **setting), {}, torch.zeros(1, 2, 1), torch.sum)


def test_slime_in_its_first_update_has_no_old_log_probs() -> None:
    """The ratio is then 1, and the gradient is that of REINFORCE."""
    logits = torch.tensor([-1.0, -2.0, -3.0]).view(1, 3, 1).requires_grad_()
    batch = {"advantages": [torch.ones(2), -torch.ones(1)], "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])]}
    batch |= {"response_lengths": [2, 1], "total_lengths": [2, 1], "unconcat_tokens": None}
    loss, metrics = Slime(algorithms.dapo())(slime_args(algorithms.dapo()), batch, logits, torch.sum)
    loss.backward()
    assert logits.grad.flatten().tolist() == [-1.0, 0.0, 1.0]
    assert (loss.item(), metrics["loss"].item()) == (0.0, 0.0)


def test_absent() -> None:
    for name in [name for name in sys.modules if name.startswith("nemo_rl")]:
        sys.modules[name] = None  # type: ignore[assignment]
    with pytest.raises(ImportError, match=r"NeMoRL needs nemo-rl .*: pip install nemo-rl"):
        NeMoRL(algorithms.dapo())
