"""The losses of TRL 1.16's DPOTrainer and RewardTrainer on a tiny model, and ours of its log-probs: the same."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from rlprims import losses
from rlprims.algorithms import use
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf import StoredTraining
from rlprims.fit.config import FitDataConfig
from rlprims.fit.loop import batch_of
from rlprims.fit.rows import Reader, as_batch
from rlprims.layout import sequence_sum
from rlprims.logprobs import from_logits
from tests import tiny

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PAIRS = [
    {"prompt": "1+2=", "chosen": "3a", "rejected": "4bcd"},
    {"prompt": "2+2=", "chosen": "4efg", "rejected": "5"},
    {"prompt": "7-2=", "chosen": "5", "rejected": "6abc"},
]
COMMON: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
SMOOTHED = {"label_smoothing": 0.2}
CASES = [
    ("sigmoid", {}, losses.dpo, {}),
    ("hinge", {}, losses.hinge, {}),
    ("robust", SMOOTHED, losses.robust_dpo, SMOOTHED),
    ("exo_pair", SMOOTHED, losses.exo, SMOOTHED),
    ("nca_pair", {}, losses.nca, {}),
    ("bco_pair", {}, losses.bco, {}),
    ("sppo_hard", {}, losses.sppo_hard, {}),
    ("apo_zero", {}, losses.apo_zero, {}),
    ("apo_down", {}, losses.apo_down, {}),
    ("discopop", {"discopop_tau": 0.5}, losses.discopop, {"tau": 0.5}),
    ("sigmoid", {"f_divergence_type": "forward_kl"}, losses.f_dpo, {"divergence": "forward_kl"}),
    ("sigmoid", {"f_divergence_type": "js_divergence"}, losses.f_dpo, {"divergence": "js"}),
    (
        "sigmoid",
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25},
        losses.f_dpo,
        {"divergence": "alpha", "alpha": 0.25},
    ),
]


def response_log_probs(model: torch.nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of each response, and their numbers: chosen ones first."""
    ids, mask = inputs["input_ids"], inputs["completion_mask"][:, 1:].bool()
    logits = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits[:, :-1]
    return sequence_sum(from_logits(logits, ids[:, 1:]), mask), mask.sum(-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("models")
    return tiny.save_model(folder / "policy"), tiny.save_model(folder / "reference", seed=1)


def gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def trainer_of(models: tuple[Any, Any], folder: Any, loss_type: str, settings: dict[str, Any]) -> DPOTrainer:
    policy, reference = map(AutoModelForCausalLM.from_pretrained, models)
    config = DPOConfig(output_dir=str(folder), loss_type=[loss_type], beta=0.3, **settings, **COMMON)
    data = Dataset.from_list(PAIRS)
    return DPOTrainer(policy, reference, config, train_dataset=data, processing_class=tiny.tokenizer())


@pytest.mark.parametrize(("loss_type", "settings", "ours", "options"), CASES)
def test_the_loss_and_its_gradient_are_trls(models, tmp_path, loss_type, settings, ours, options) -> None:
    trainer = trainer_of(models, tmp_path, loss_type, settings)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, inputs)
    policy, reference = trainer.model.eval(), trainer.ref_model.eval()
    sums, _ = response_log_probs(policy, inputs)
    with torch.no_grad():
        ref_sums, _ = response_log_probs(reference, inputs)
    loss = ours(*sums.chunk(2), *ref_sums.chunk(2), beta=0.3, **options).mean()
    assert (sums - ref_sums).abs().min() > 0.1  # the two models differ
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    mine, other = gradient(loss, policy), gradient(theirs, policy)
    assert (mine - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize(
    ("loss_type", "settings", "ours", "how"),
    [
        ("sigmoid", {}, use(losses.dpo, beta=0.3), {}),
        ("sigmoid", {"ld_alpha": 0.25}, use(losses.dpo, beta=0.3), {"tail_weight": 0.25}),
        ("apo_zero", {}, use(losses.apo_zero, beta=0.3), {}),
        ("ipo", {}, use(losses.ipo, tau=0.3), {"means": True}),
    ],
)
def test_a_run_on_the_same_file_begins_as_trls(models, tmp_path, loss_type, settings, ours, how) -> None:
    """From the texts to the first gradient: ``rlprims fit`` reads the rows that TRL's trainer reads."""
    trainer = trainer_of(models, tmp_path / "trl", loss_type, settings)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model.eval(), inputs)
    other = gradient(theirs, trainer.model)

    data = FitDataConfig(train=tiny.write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    rows = Reader(data, "pairs", tiny.tokenizer(), [tiny.EOS_ID], 128).read(data.train).rows
    options = {"loss": ours, "aggregation": use(losses.token_mean), "tokenizer": tiny.tokenizer(), "updates": 1}
    policy, reference = (
        StoredTraining(ModelConfig(path=str(path)), OptimizerConfig(), **how, **options) for path in models
    )
    of_reference = reference.sequence_log_probs(as_batch(rows, tiny.PAD_ID))
    seen: list[Tensor] = []
    policy.policy.step = lambda: (seen.extend(p.grad for p in policy.policy.masters), (1.0, 1.0, False))[1]
    report = policy.update_rows(batch_of(rows, range(len(rows)), tiny.PAD_ID, of_reference))
    torch.testing.assert_close(torch.tensor(report.loss), theirs.detach(), rtol=1e-5, atol=1e-6)
    mine = torch.cat([g.flatten() for g in seen])
    assert (mine - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired"])
def test_aot_is_dpo_of_sorted_numbers(models, tmp_path, loss_type) -> None:
    """As docs/papers.md has it: of the margins of policy and reference, or of the log-ratios."""
    trainer = trainer_of(models, tmp_path, loss_type, {})
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, inputs)
    sums, _ = response_log_probs(trainer.model.eval(), inputs)
    ref_sums, _ = response_log_probs(trainer.ref_model.eval(), inputs)
    (chosen, rejected), (ref_chosen, ref_rejected) = sums.chunk(2), ref_sums.chunk(2)
    first, second = chosen - rejected, ref_chosen - ref_rejected
    if loss_type == "aot_unpaired":
        first, second = chosen - ref_chosen, rejected - ref_rejected
    z = torch.zeros_like(first)
    loss = losses.dpo(first.sort().values, second.sort().values, z, z, beta=0.3).mean()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    mine, other = gradient(loss, trainer.model), gradient(theirs, trainer.model)
    assert (mine - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize(("loss_type", "ours"), [("sigmoid_norm", losses.dpo), ("ipo", losses.ipo)])
def test_two_of_trls_take_means_over_tokens(models, tmp_path, loss_type, ours) -> None:
    trainer = trainer_of(models, tmp_path, loss_type, {})
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, inputs)
    sums, lengths = response_log_probs(trainer.model.eval(), inputs)
    ref_sums, _ = response_log_probs(trainer.ref_model.eval(), inputs)
    option = {"tau": 0.3} if loss_type == "ipo" else {"beta": 0.3}
    loss = ours(*(sums / lengths).chunk(2), *(ref_sums / lengths).chunk(2), **option).mean()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("margin", [None, [0.5, 1.0, 0.0]])
def test_a_reward_models_loss_is_trls(tmp_path, margin) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny.save_classifier(tmp_path / "model"), num_labels=1)
    rows = PAIRS if margin is None else [{**row, "margin": m} for row, m in zip(PAIRS, margin, strict=True)]
    config = RewardConfig(output_dir=str(tmp_path), center_rewards_coefficient=0.1, **COMMON)
    data = Dataset.from_list(rows)
    trainer = RewardTrainer(model, config, train_dataset=data, processing_class=tiny.tokenizer())
    inputs = next(iter(trainer.get_train_dataloader()))
    margins = inputs.get("margin")
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    scores = trainer.model.eval()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    chosen, rejected = scores.squeeze(-1).chunk(2)
    loss = losses.bradley_terry(chosen, rejected, margins, centering=0.1).mean()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
