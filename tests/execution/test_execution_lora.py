"""LoRA in one process: what is trained and what stays, the reference without a copy, and what a checkpoint holds."""

import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel

from rlprims import algorithms
from tests import tiny
from tests.execution.execution_contract import (
    OPTIMIZER,
    identical,
    local,
    plain_logits,
    responses,
    training_batch,
    weights,
    with_columns,
)

GRPO = algorithms.grpo()
PPO = algorithms.ppo()
REINFORCE = algorithms.reinforce()
LORA = {"rank": 4, "alpha": 8}


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def base(path):
    return local(path, GRPO)


@pytest.fixture(scope="module")
def batch(base):
    return training_batch(base)


@pytest.fixture(scope="module")
def learned(path, batch):
    """A policy and a critic after two updates each."""
    execution = local(path, PPO, lora=LORA)
    for _ in range(2):
        execution.update(batch, PPO)
        execution.update_critic(batch, PPO)
    return execution


@pytest.fixture(scope="module")
def saved(learned, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    learned.save(directory)()
    return directory


def scores(module, batch, row=0):
    """Log-probs of one response, computed alone."""
    with torch.no_grad():
        log_probs = plain_logits(module, batch, row).double().log_softmax(-1).float()
    return log_probs.gather(1, torch.tensor(responses(batch)[row])[:, None])[:, 0]


class TestThePolicy:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_adapters_begin_as_the_model_itself(self, path, batch, dtype):
        plain, adapted = (local(path, GRPO, dtype=dtype, lora=lora) for lora in (None, LORA))
        assert torch.equal(adapted.log_probs(batch), plain.log_probs(batch))
        assert torch.equal(training_batch(adapted)["responses"], training_batch(plain)["responses"])

    def test_a_step_changes_the_adapters_and_nothing_else(self, path, batch):
        module = (execution := local(path, GRPO, lora=LORA)).training.policy.module
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        for _ in range(2):  # while B is 0 there is no gradient of A
            execution.update(batch, GRPO)
        changed = {name for name, parameter in module.named_parameters() if not torch.equal(parameter, before[name])}
        assert changed == {name for name in before if ".lora_" in name}
        assert len(changed) == 2 * 7 * 2  # A and B of seven layers in two blocks
        slots = execution.training.policy.optimizer.state
        assert len(slots) == len(changed)

    def test_the_step_is_that_of_peft_and_torch(self, path, batch):
        """REINFORCE with A = 1 is cross-entropy; row by row, by peft's own model, in one graph."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), settings)
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            learning,
            lr=OPTIMIZER.lr,
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
        )
        execution = local(path, REINFORCE, lora=LORA)
        ones = with_columns(batch, advantages=torch.ones(batch["responses"].shape))
        for _ in range(3):
            rows = [
                cross_entropy(plain_logits(model, batch, i), torch.tensor(row), reduction="sum")
                for i, row in enumerate(responses(batch))
            ]
            loss = torch.stack(rows).sum() / batch["response_mask"].sum()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(learning, OPTIMIZER.max_grad_norm)
            optimizer.step()
            report = execution.update(ones, REINFORCE)
            assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
            assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)

    def test_a_critic_has_adapters_of_its_own_and_its_head(self, learned, batch):
        critic, policy = learned.training.critic.module, learned.training.policy.module
        names = set(trained(critic))
        assert {name for name in names if ".lora_" not in name} == {"score.weight", "score.bias"}
        assert {name for name in names if ".lora_" in name} == set(trained(policy))
        assert (learned.values(batch) != 0).any()

    def test_adapters_are_float32_beside_a_model_in_16_bits(self, path, batch):
        execution = local(path, PPO, lora=LORA, dtype="bfloat16")
        for learner in execution.training.train_states().values():
            assert {parameter.dtype for parameter in trained(learner.module).values()} == {torch.float32}
            assert {p.dtype for p in learner.module.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert not any(update(batch, PPO).skipped for update in (execution.update, execution.update_critic))

    def test_rank_stabilized(self, path, batch):
        """alpha / sqrt(4) is twice alpha / 4."""
        half = local(path, GRPO, lora=LORA | {"rank_stabilized": True, "alpha": 4})
        whole = local(path, GRPO, lora=LORA)
        for execution in (half, whole):
            execution.update(batch, GRPO)
        assert torch.equal(half.log_probs(batch), whole.log_probs(batch))

    def test_some_layers(self, path):
        execution = local(path, GRPO, lora=LORA | {"target_modules": ["q_proj", "down_proj"]})
        names = {name.split(".")[-4] for name in trained(execution.training.policy.module)}
        assert names == {"q_proj", "down_proj"}


class TestTheReference:
    def test_the_reference_of_adapters_is_the_policy_without_them(self, path, base, batch):
        execution = local(path, GRPO, lora=LORA)
        for _ in range(2):
            execution.update(batch, GRPO)
        assert torch.equal(execution.log_probs(batch, reference=True), base.log_probs(batch))
        assert (execution.log_probs(batch) - base.log_probs(batch)).abs().max() > 0.1
        assert execution.training.reference is execution.training.policy.module

    def test_asking_it_first_does_not_stop_the_learning(self, path, batch):
        asked, unasked = (local(path, GRPO, lora=LORA) for _ in range(2))
        asked.log_probs(batch, reference=True)
        assert asked.update(batch, GRPO)[:3] == unasked.update(batch, GRPO)[:3]

    def test_the_reference_of_adapters_may_be_another_model(self, path, batch, tmp_path):
        other = tiny.save_model(tmp_path, seed=7)
        execution = local(path, GRPO, lora=LORA, reference=str(other))
        expected = local(other, REINFORCE).log_probs(batch)
        assert torch.equal(execution.log_probs(batch, reference=True), expected)


class TestACheckpoint:
    def test_the_policy_is_whole_and_merged(self, learned, saved, batch):
        plain = AutoModelForCausalLM.from_pretrained(saved / "policy", dtype=torch.float32).eval()
        ours = learned.log_probs(batch)[0]
        torch.testing.assert_close(scores(plain, batch), ours[: len(responses(batch)[0])], rtol=1e-5, atol=2e-5)

    def test_the_adapter_is_pefts(self, learned, saved, path, batch):
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, saved / "policy_adapter").eval()
        ours = learned.log_probs(batch)[0]
        # A log-prob of -6 has 5e-7 between neighbours in float32, so 1e-6 alone would ask for two of them.
        torch.testing.assert_close(scores(model, batch), ours[: len(responses(batch)[0])], rtol=1e-6, atol=1e-6)

    def test_the_critics_adapter_loads_in_peft(self, learned, saved, path, batch):
        base = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, saved / "critic_adapter").eval()
        prompt, response = batch["prompt_ids"][0], responses(batch)[0]
        with torch.no_grad():
            values = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(values, learned.values(batch)[0, : len(response)], rtol=0, atol=1e-5)

    def test_the_next_updates_are_bitwise_the_same(self, saved, path, batch, tmp_path):
        reports, ends = [], []
        for name in "ab":
            execution = local(path, PPO, lora=LORA)
            execution.load(saved)
            reports.append([(execution.update(batch, PPO)[:3], execution.update_critic(batch, PPO)[:3])])
            ends.append(weights(execution, tmp_path / name))
        assert reports[0] == reports[1]
        assert identical(*ends)
        assert not identical(ends[0], load_file(saved / "policy" / "model.safetensors"))

    @pytest.mark.parametrize("other", [None, LORA | {"rank": 8}, LORA | {"target_modules": ["q_proj"]}])
    def test_a_checkpoint_is_refused_by_other_adapters(self, saved, path, other, tmp_path):
        if other is None:  # a checkpoint without adapters, asked for by a policy with them
            weights(local(path, PPO), tmp_path / "save")
            saved, other = tmp_path / "save", LORA
        with pytest.raises(ValueError, match="policy_adapter does not fit the model"):
            local(path, PPO, lora=other).load(saved)

    def test_another_base_is_noticed(self, saved, tmp_path):
        other = tiny.save_model(tmp_path, seed=9, tie_word_embeddings=True)
        with pytest.raises(ValueError, match=rf"policy_adapter was trained on other weights than {other} has now"):
            local(other, PPO, lora=LORA).load(saved)

    def test_layers_that_are_stored_transposed(self, tmp_path):
        """GPT-2 keeps its matrices as (in, out)."""
        settings = GPT2Config(
            vocab_size=32, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=tiny.EOS_ID
        )
        torch.manual_seed(0)
        GPT2LMHeadModel(settings).save_pretrained(tmp_path / "gpt2")
        execution = local(tmp_path / "gpt2", REINFORCE, lora=LORA)
        batch = training_batch(execution)
        before = execution.log_probs(batch)
        for _ in range(2):
            execution.update(batch, REINFORCE)
        weights(execution, tmp_path / "save")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "save" / "policy", dtype=torch.float32).eval()
        ours = execution.log_probs(batch)[0]
        torch.testing.assert_close(scores(plain, batch), ours[: len(responses(batch)[0])], rtol=1e-5, atol=2e-5)
        assert (ours - before[0]).abs().max() > 0.1


class TestWhatCannotBe:
    @pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
    @pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
    def test_embedding_and_head(self, path, name):
        with pytest.raises(
            ValueError, match=rf"target_modules: .*{name} is not a linear layer between embedding and head"
        ):
            local(path, GRPO, lora=LORA | {"target_modules": [name]})

    def test_layers_that_are_not_there(self, path):
        with pytest.raises(
            ValueError, match=r"(?s)target_modules: .*'query'.*Linear layers here: down_proj, gate_proj"
        ):
            local(path, GRPO, lora=LORA | {"target_modules": ["query"]})

    def test_no_peft(self, path, monkeypatch):
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(ValueError, match=r"needs peft: pip install '\.\[lora\]' in the clone"):
            local(path, GRPO, lora=LORA)
