"""Rows with images: in a batch, sampled and trained they have the numbers that each has alone in transformers."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import LoraConfig, ModelConfig, OptimizerConfig, Sampling
from rlprims.execution._columns import left_padded, right_padded
from rlprims.execution.hf import Generation, Training, export_model, with_counts
from rlprims.execution.hf._families import VISION_MODELS
from rlprims.execution.hf._vision import placeholders, tower
from rlprims.execution.local import LocalExecution
from rlprims.plan.sizes import shape_of
from rlprims.vision.processor import load_processor
from tests import tiny
from tests.execution import vision_zoo
from tests.execution.execution_contract import OPTIMIZER

PICTURES = [vision_zoo.picture(i, *size) for i, size in enumerate([(20, 12), (8, 30), (16, 16), (20, 12)])]
ROWS = (
    ("ab{}c", PICTURES[:1]),
    ("d{}{}", PICTURES[1:3]),
    ("1+2=", []),
    ("ab{}c", PICTURES[3:]),
    ("ab{}c", PICTURES[:1]),
)
"""The second ends with an image. The first, fourth and last have the same tokens, and the fourth another image."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a type's model, its processor, and the model as transformers alone loads it."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = vision_zoo.save(kind, tmp_path_factory.mktemp(kind))
            model = AutoModelForImageTextToText.from_pretrained(folder).eval()
            made[kind] = str(folder), load_processor(str(folder)), model
        return made[kind]

    return get


def read_by(processor, text, images):
    """What the processor of transformers makes of a prompt."""
    text = text.format(*[f"<begin>{processor.image_token}<end>"] * len(images))
    pictures = [[vision_zoo.opened(image) for image in images]] if images else None
    return dict(processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False))


def prompts_of(processor, rows=ROWS):
    ids = [read_by(processor, *row)["input_ids"][0].tolist() for row in rows]
    columns = {"prompt_ids": ids, "images": [tuple(images) for _, images in rows]}
    return DataProto.from_dict({"sample_id": torch.arange(len(rows))}, columns)


def batch_of(processor, rows=ROWS):
    """Ragged prompts and responses."""
    prompts = prompts_of(processor, rows)
    lengths = [(6, 3, 5, 1, 4)[i % 5] for i in range(len(rows))]
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(5, 30, (n,), generator=generator).tolist() for n in lengths]
    ids = list(prompts["prompt_ids"])
    left, in_prompt = left_padded(ids, max(map(len, ids)), 0)
    right, mask = right_padded(responses, 6, 0)
    tensors = {"prompts": left, "responses": right, "attention_mask": torch.cat([in_prompt, mask], 1)}
    return DataProto.from_dict(
        {**tensors, "response_mask": mask, "advantages": mask * 1.0}, {"images": prompts["images"]}
    )


def alone(model, processor, row, response, *, banned=True):
    """(t,): the log-probs of a response by one forward pass of transformers, without padding, cache or library."""
    read = read_by(processor, *row)
    read["input_ids"] = torch.cat([read["input_ids"], response[None]], 1)
    for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in read:
            read[name] = torch.nn.functional.pad(read[name], (0, len(response)), value=int(name == "attention_mask"))
    model.base_model.rope_deltas = None
    logits = model(**read, use_cache=False).logits[0, -len(response) - 1 : -1].float()
    if banned:
        logits[:, placeholders(model.config)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]


def each_alone(model, processor, batch, rows=ROWS, **how):
    found = torch.zeros(batch["responses"].shape)
    for i, row in enumerate(rows):
        length = int(batch["response_mask"][i].sum())
        found[i, :length] = alone(model, processor, row, batch["responses"][i, :length], **how)
    return found


def training_of(folder, updates=2, algorithm=None, optimizer=OPTIMIZER, **changes):
    config = ModelConfig(path=folder, device="cpu", **changes)
    return Training(config, optimizer, algorithm=algorithm or algorithms.reinforce(), temperature=1.0, updates=updates)


def update(training, batch):
    whole, totals = with_counts(batch, algorithms.reinforce())
    return training.update(whole, algorithms.reinforce(), totals)


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


def test_every_type_has_a_tiny_model():
    assert {*vision_zoo.MODELS} == {*VISION_MODELS}


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_rows_in_a_batch_are_those_alone(saved, kind):
    folder, processor, model = saved(kind)
    batch = batch_of(processor)
    with torch.no_grad():
        expected = each_alone(model, processor, batch)
    training = training_of(folder)
    found = training.log_probs(batch)
    close(found, expected)
    assert torch.equal(training.log_probs(batch), found)
    longest = int(batch["attention_mask"].sum(-1).max())
    small = training_of(folder, max_tokens_per_micro_batch=longest).log_probs(batch)
    close(small, expected)
    blind = batch[torch.arange(len(batch))]
    blind.non_tensor_batch["images"][:] = [tuple(row[::-1]) for row in batch["images"]]
    swapped = training.log_probs(blind)
    close(swapped[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    assert (swapped[1] - expected[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_sampled_rows_are_those_alone(saved, kind):
    """Two samples of each prompt, most of which end before the others."""
    folder, processor, model = saved(kind)
    rows = [row for row in ROWS for _ in range(2)]
    training = training_of(folder)
    generation = Generation(training.policy.module, vision_zoo.tokenizer(), max_rows=64, model=training.model)
    generation.end_ids = [*range(1, 12)]
    batch = generation.generate(prompts_of(processor, rows), Sampling(max_new_tokens=12), seed=3, prompt_width=None)
    lengths = batch["response_mask"].sum(-1)
    assert lengths.min() < 6 < lengths.max()
    with torch.no_grad():
        close(batch["rollout_log_probs"], each_alone(model, processor, batch, rows))
    close(training.log_probs(batch), batch["rollout_log_probs"])


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_the_gradient_of_a_row_is_that_alone(saved, kind):
    folder, processor, model = saved(kind)
    batch = batch_of(processor)
    training = training_of(folder, vision="trained")
    [part] = training._parts(batch, False, None)
    found = training._policy_scorer().token_scores(part.data, ["log_probs"])["log_probs"][1].sum()
    expected = alone(model, processor, ROWS[1], batch["responses"][1, :3]).sum()
    assert tower(model).keys() == tower(training.policy.module).keys()

    def gradients(value, module):
        return torch.autograd.grad(value, [*module.parameters()], allow_unused=True, materialize_grads=True)

    alone_, ours = gradients(expected, model), gradients(found, training.policy.module)
    largest = max(float(x.abs().max()) for x in alone_)
    for (name, _), x, y in zip(model.named_parameters(), alone_, ours, strict=True):
        assert (x - y).abs().max() < 2e-4 * largest, name
    seeing = [x for (name, _), x in zip(model.named_parameters(), ours, strict=True) if name in tower(model)]
    assert max(float(x.abs().max()) for x in seeing) > 1e-3 * largest


def execution_of(folder, optimizer=OPTIMIZER, **model):
    config = ModelConfig(path=folder, device="cpu", **model)
    run = {"algorithm": algorithms.reinforce(), "temperature": 1.0, "updates": 4}
    return LocalExecution(config, optimizer, tokenizer=vision_zoo.tokenizer(), **run)


def copies(parameters):
    return {name: x.detach().clone() for name, x in parameters.items()}


def moved(before, after):
    return {name: float((after[name].detach() - x).abs().max()) for name, x in before.items()}


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_a_frozen_part_keeps_its_bits_and_a_trained_one_moves(saved, kind):
    folder, processor, _ = saved(kind)
    batch = batch_of(processor)
    for vision in ("frozen", "trained"):
        training = training_of(folder, vision=vision)
        module = training.policy.module
        seeing = tower(module)
        before = copies(dict(module.named_parameters()))
        update(training, batch)
        change = moved(before, dict(module.named_parameters()))
        assert max(size for name, size in change.items() if name not in seeing) > 1e-3
        assert (max(change[name] for name in seeing) > 1e-3) == (vision == "trained")
        assert all(change[name] == 0 for name in seeing) == (vision == "frozen")
        held = {id(x) for x in training.policy.optimizer.state}
        assert (held & {id(x) for x in seeing.values()} != set()) == (vision == "trained")


def test_its_learning_rate_is_that_of_its_weights_alone(saved):
    """Adam's first step is the learning rate times the sign of the gradient."""
    folder, processor, _ = saved("qwen2_5_vl")
    optimizer = OptimizerConfig(lr=1e-4, eps=1e-12, weight_decay=0.0)
    training = training_of(folder, optimizer=optimizer, vision="trained", vision_lr=2e-3)
    module = training.policy.module
    before = copies(dict(module.named_parameters()))
    update(training, batch_of(processor))
    for name, size in moved(before, dict(module.named_parameters())).items():
        if size:
            assert size == pytest.approx(2e-3 if name in tower(module) else 1e-4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_a_resumed_run_and_an_exported_model_have_the_same_numbers(saved, kind, vision, tmp_path):
    folder, processor, _ = saved(kind)
    batch = batch_of(processor)
    execution = execution_of(folder, vision=vision)
    execution.update(batch, algorithms.reinforce())
    execution.save(tmp_path / "step")()
    now = execution.log_probs(batch)
    resumed = execution_of(folder, vision=vision)
    resumed.load(tmp_path / "step")
    assert torch.equal(resumed.log_probs(batch), now)
    first, second = (one.update(batch, algorithms.reinforce()) for one in (execution, resumed))
    assert first.grad_norm == second.grad_norm
    assert torch.equal(resumed.log_probs(batch), execution.log_probs(batch))
    export_model(tmp_path / "step" / "policy", tmp_path / "exported")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        close(each_alone(model, load_processor(str(tmp_path / "exported")), batch), now)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "fc1")])
def test_adapters_are_beside_the_language_model_alone(saved, targets, tmp_path):
    """SigLIP has layers of these names too."""
    folder, processor, _ = saved("smolvlm")
    lora = LoraConfig(rank=2, target_modules=targets)
    if targets != "all-linear":
        with pytest.raises(ValueError, match="target_modules"):
            training_of(folder, lora=LoraConfig(target_modules=("fc1",)))
    execution = execution_of(folder, lora=lora)
    module = execution.training.policy.module
    adapted = {name for name, x in module.named_parameters() if x.requires_grad}
    assert adapted
    assert all("text_model" in name and ".lora_" in name for name in adapted)
    before, batch = copies(tower(module)), batch_of(processor)
    was = execution.log_probs(batch)
    execution.update(batch, algorithms.reinforce())
    execution.save(tmp_path)()
    now = execution.log_probs(batch)
    assert (now - was).abs().max() > 1e-4
    assert not any(moved(before, tower(module)).values())
    resumed = execution_of(folder, lora=lora)
    resumed.load(tmp_path)
    assert torch.equal(resumed.log_probs(batch), now)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "policy").eval()
    with torch.no_grad():
        close(each_alone(merged, load_processor(str(tmp_path / "policy")), batch), now)
        beside = PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(folder), tmp_path / "policy_adapter"
        )
        close(each_alone(beside.base_model.model.eval(), processor, batch), now)


def test_a_placeholder_is_never_sampled_and_has_no_share(saved, tmp_path):
    """It would be the likeliest token; without it the other probabilities sum to 1."""
    _, processor, model = saved("qwen2_5_vl")
    changed = AutoModelForImageTextToText.from_config(model.config).eval()
    changed.load_state_dict(model.state_dict())
    hidden = changed.get_output_embeddings().weight.data
    for token in placeholders(model.config):
        hidden[token] = 5 * hidden[5:30].abs().max() * hidden[7].sign()
    folder = vision_zoo.save("qwen2_5_vl", tmp_path)
    changed.save_pretrained(folder)
    execution = execution_of(str(folder))
    prompts = prompts_of(processor)
    batch = execution.generate(prompts, Sampling(max_new_tokens=12, ignore_eos=True), seed=0, prompt_width=None)
    assert not torch.isin(batch["responses"], torch.tensor(placeholders(model.config))).any()
    close(execution.log_probs(batch), batch["rollout_log_probs"])
    with torch.no_grad():
        close(each_alone(changed, processor, batch), batch["rollout_log_probs"])
    assert execution.entropies(batch).isfinite().all()
    top = execution.top_tokens(batch, vision_zoo.VOCABULARY - len(placeholders(model.config)))
    assert not torch.isin(top[batch["response_mask"]], torch.tensor(placeholders(model.config))).any()


def test_a_reference_reads_images_and_follows(saved):
    folder, processor, _ = saved("smolvlm")
    batch, optimizer = batch_of(processor), OptimizerConfig(name="muon", lr=1e-2)
    how = {"algorithm": algorithms.grpo(kl_coef=0.1), "optimizer": optimizer, "vision": "trained"}
    for follows in (None, {"rate": 1.0, "every": 1}):
        training = training_of(folder, **how, reference_follows=follows)
        assert torch.equal(training.log_probs(batch), training.log_probs(batch, reference=True))
        update(training, batch)
        same = torch.equal(training.log_probs(batch), training.log_probs(batch, reference=True))
        assert same == (follows is not None)


def test_text_alone_needs_no_column_of_images(saved):
    """With ``none`` the model is one of text: packed, and with a share for each token."""
    folder, processor, model = saved("gemma3")
    text = (("ab", []), ("1+2=3", []))
    batch = batch_of(processor, text)
    del batch.non_tensor_batch["images"]
    with torch.no_grad():
        close(training_of(folder).log_probs(batch), each_alone(model, processor, batch, text))
        close(
            training_of(folder, vision="none").log_probs(batch), each_alone(model, processor, batch, text, banned=False)
        )


def test_half_precision(saved):
    folder, processor, model = saved("qwen2_5_vl")
    execution = execution_of(folder, dtype="bfloat16")
    batch = execution.generate(prompts_of(processor), Sampling(max_new_tokens=12), seed=0, prompt_width=None)
    mask = batch["response_mask"]
    with torch.no_grad():
        exact = each_alone(model, processor, batch)
    for found in (execution.log_probs(batch), batch["rollout_log_probs"]):
        assert (found - exact)[mask].abs().mean() < execution.tolerance
    assert execution.update(batch_of(processor), algorithms.reinforce()).grad_norm > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, "model.packing: true: not yet"),
        ({"fused_head": True}, "model.fused_head: true: not yet"),
        ({"replay_routes": True}, "model.replay_routes: true: not yet"),
        ({"router_aux_loss_coef": 0.1}, "model.router_aux_loss_coef: not yet"),
        ({"teacher": "http://localhost:1"}, "model.teacher on a server: not yet"),
        ({"vision": "none"}, "a qwen2_5_vl is refused: .* execution: local does with model.vision: frozen"),
    ],
)
def test_what_no_test_has_is_refused(saved, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        training_of(saved("qwen2_5_vl")[0], **settings)
    assert "\n" not in str(error.value)


def test_a_critic_and_models_of_other_types_are_refused(saved, tmp_path):
    folder, processor, _ = saved("qwen2_5_vl")
    with pytest.raises(ValueError, match="a critic: not yet"):
        training_of(folder, algorithm=algorithms.ppo())
    text = str(tiny.save_model(tmp_path))
    with pytest.raises(ValueError, match=r"expected a qwen2_5_vl as model\.path is, which reads images, got a qwen2"):
        training_of(folder, algorithm=algorithms.grpo(kl_coef=0.1), reference=text)
    with pytest.raises(ValueError, match="rows have images: expected a model that reads them"):
        training_of(text).log_probs(batch_of(processor))


def test_settings_that_exclude_each_other():
    for settings, message in (
        ({"vision": "trained", "lora": {}}, "vision: trained needs whole weights"),
        ({"vision_lr": 1e-5}, "vision_lr: expected vision: trained, got frozen"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(path="x", **settings)


def test_a_plan_counts_the_part_that_reads_images(saved):
    folder, _, model = saved("qwen2_5_vl")
    shapes = {vision: shape_of(ModelConfig(path=folder, vision=vision)) for vision in ("frozen", "trained")}
    whole, seeing = (sum(x.numel() for x in part) for part in (model.parameters(), tower(model).values()))
    assert {name: (shape.parameters, shape.trained) for name, shape in shapes.items()} == {
        "frozen": (whole, whole - seeing),
        "trained": (whole, whole),
    }
