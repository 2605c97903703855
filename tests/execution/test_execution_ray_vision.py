"""Rows with images on a cluster: the numbers of the local execution, and of each row alone in transformers."""

import pickle
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, RayConfig, Sampling
from rlprims.execution.hf import export_model
from rlprims.execution.hf._vision import placeholders, tower
from rlprims.execution.local import LocalExecution
from rlprims.vision.processor import collapsed, load_processor
from tests.execution import vision_zoo
from tests.execution.test_execution_vision import batch_of, close, each_alone, prompts_of, read_by

pytestmark = pytest.mark.ray
KIND = "idefics3"
A, B, C = (vision_zoo.picture(i, *size) for i, size in enumerate([(20, 12), (8, 30), (16, 16)]))
ROWS = [("ab{}c", [A])] * 2 + [("d{}{}", [B, C])] * 2 + [("1+2=", [])] * 2 + [("ab{}c", [C])] * 2
"""Pairs. The first and the last pair have different images of equal token counts."""
WITH_TORCHVISION = find_spec("torchvision") is not None
TEXTS = [(text.replace("{}", ""), []) for text, _ in ROWS]
LONE = [*ROWS[:2], *TEXTS[2:]]
"""One pair alone has images, so that one of two ranks has none."""
SAMPLING = Sampling(max_new_tokens=8)
GRPO = algorithms.grpo()
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)  # Adam makes much of differences in rounding


def saved_to(folder, kind=KIND):
    """vLLM's attention on a CPU takes heads of 32 and more."""
    vision = vision_zoo.MODELS[kind]["vision"]
    with (
        patch.dict(vision_zoo.TEXT, head_dim=32, hidden_size=64),
        patch.dict(vision_zoo.MROPE, mrope_section=[4, 6, 6]),
        patch.dict(vision, {"out_hidden_size": 64} if "out_hidden_size" in vision else {}),
    ):
        vision_zoo.save(kind, folder)
    if kind == "qwen2_5_vl" and WITH_TORCHVISION:  # vLLM reads it too
        transformers.Qwen2VLVideoProcessor(patch_size=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(saved_to(tmp_path_factory.mktemp(KIND)))


@pytest.fixture(scope="module")
def processor(folder):
    return load_processor(folder)


def run_of(folder, **model):
    config = ModelConfig(path=folder, device="cpu", **model)
    needs = {"algorithm": GRPO, "temperature": 1.0, "updates": 10, "images": True}
    return config, {"tokenizer": vision_zoo.tokenizer(), **needs}


def local(folder, **model):
    config, run = run_of(folder, **model)
    return LocalExecution(config, SLOW, **run)


def cluster(folder, *, settings=None, algorithm=GRPO, **how):
    from rlprims.execution.ray import RayExecution
    from rlprims.execution.ray._cluster import connect

    connect(None, cpus=64)  # logical ones: several executions live at once
    config, run = run_of(folder, **(settings or {}))
    limits = dict.fromkeys(("call_timeout", "training_timeout"), 120.0)
    how = {"engine": "vllm", "kv_cache_bytes": 64 << 20, "start_timeout": 480.0, **limits, **how}
    return RayExecution(RayConfig(**how), config, SLOW, **run | {"algorithm": algorithm})


@pytest.fixture(scope="module")
def two_ranks(folder):
    execution = cluster(folder, training_workers=2)
    yield execution
    execution.close()


def sampled(execution, processor, seed, rows=ROWS, sampling=SAMPLING):
    return execution.generate(prompts_of(processor, rows), sampling, seed=seed, prompt_width=None)


def with_advantages(batch, old, reference):
    """Advantages of pairs, which differ in sign."""
    signs = torch.tensor([1.0, -1.0]).repeat(len(batch) // 2)[:, None]
    columns = {"advantages": signs * batch["response_mask"], "old_log_probs": old, "ref_log_probs": reference}
    return batch.union(DataProto.from_dict(tensors=columns))


def same_steps(one, many, model, processor, count=3, *, same_draws=True, rows=(ROWS,)):
    """Step by step: the same tokens, log-probs, loss and norm, after a verified sync of the weights."""
    before = None
    for step in range(count):
        mine, theirs = (sampled(each, processor, step, rows[step % len(rows)]) for each in (one, many))
        if same_draws:
            assert torch.equal(mine["responses"], theirs["responses"])
            close(theirs["rollout_log_probs"], mine["rollout_log_probs"], atol=2e-5)
        assert not torch.isin(theirs["responses"], torch.tensor(placeholders(model.config))).any()
        scored, again = one.log_probs(theirs), many.log_probs(theirs)
        close(again, scored, atol=1e-5)
        close(theirs["rollout_log_probs"], again, atol=2e-5)
        if step == 0:
            with torch.no_grad():
                close(again, each_alone(model, processor, theirs, rows[0]), atol=2e-5)
        else:
            assert (one.log_probs(before) - before["rollout_log_probs"]).abs().max() > 1e-3  # the weights have moved
        reference, first = (each.log_probs(theirs, reference=True) for each in (one, many))
        close(first, reference, atol=1e-5)
        batch = with_advantages(theirs, again, first)
        a, b = one.update(batch, GRPO), many.update(batch, GRPO)
        assert b.loss == pytest.approx(a.loss, abs=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
        assert a.grad_norm > 1e-3
        one.sync_weights()
        many.sync_weights()
        before = theirs


def test_three_steps_as_one_process(folder, processor, two_ranks):
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    same_steps(local(folder), two_ranks, model, processor)


def test_a_trained_part_moves_as_in_one_process(folder, processor, tmp_path):
    """In micro-batches of which some have no images, with images on one rank alone, and in a step without any."""
    how = {"vision": "trained", "vision_lr": 2e-3, "max_tokens_per_micro_batch": 80}
    model, one = AutoModelForImageTextToText.from_pretrained(folder).eval(), local(folder, **how)
    first, many = (
        {name: x.clone() for name, x in tower(model).items()},
        cluster(folder, training_workers=2, settings=how),
    )
    same_steps(one, many, model, processor, count=4, rows=(ROWS, LONE, TEXTS, ROWS))
    assert_compared(many, model)
    many.save(tmp_path / "step")()
    batch, before = sampled(many, processor, 5), tmp_path / "exported"
    now = many.log_probs(batch)
    many.update(with_advantages(batch, now, now), GRPO)
    many.load(tmp_path / "step")
    assert torch.equal(many.log_probs(batch), now)
    many.close()
    export_model(tmp_path / "step" / "policy", before)
    found = tower(AutoModelForImageTextToText.from_pretrained(before))
    for name, x in tower(one.training.policy.module).items():
        close(found[name], x, atol=1e-5)
    assert max(float((x - first[name]).abs().max()) for name, x in found.items()) > 4e-3  # three steps of 2e-3


def test_a_step_without_images_leaves_the_part_that_sees(folder, processor):
    """Also on ranks, whose gradients of it would be 0: weight decay and momentum would move it."""
    execution = cluster(folder, training_workers=2, engine="hf", settings={"vision": "trained"})
    seeing = tower(AutoModelForImageTextToText.from_pretrained(folder)).keys()
    sums = []
    for step, rows in enumerate((ROWS, TEXTS)):
        batch = sampled(execution, processor, step, rows)
        scored = execution.log_probs(batch)
        execution.update(with_advantages(batch, scored, execution.log_probs(batch, reference=True)), GRPO)
        execution.sync_weights()
        sums.append(dict(execution.rollouts.sent))
    execution.close()
    assert {name for name, x in sums[1].items() if x == sums[0][name]} == seeing


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({"lora": {"rank": 4}}, {"training_workers": 2}),
        ({"lora": {"rank": 4}}, {"training_workers": 2, "engine": "hf"}),
        ({"lora": {"rank": 4, "sync": "adapter"}}, {"training_workers": 2}),
        ({}, {"colocate": True}),
        ({"vision": "trained"}, {"colocate": True, "sleep_level": 2}),
    ],
    ids=["lora", "lora-hf", "adapter", "colocate", "colocate-trained"],
)
def test_adapters_and_shared_devices_as_in_one_process(folder, processor, settings, how, tmp_path):
    model, one = AutoModelForImageTextToText.from_pretrained(folder).eval(), local(folder, **settings)
    many = cluster(folder, settings=settings, **how)
    same_steps(one, many, model, processor, rows=(ROWS, LONE))
    if many.rollouts.sent and how.get("engine") != "hf":
        assert_compared(many, model)
    batch = sampled(many, processor, 7)
    expected = many.log_probs(batch)
    many.save(tmp_path / "step")()
    many.update(with_advantages(batch, expected, expected), GRPO)
    assert (many.log_probs(batch) - expected).abs().max() > 1e-4
    many.load(tmp_path / "step")
    assert torch.equal(many.log_probs(batch), expected)
    many.close()
    export_model(tmp_path / "step" / "policy", tmp_path / "exported")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        close(each_alone(model, load_processor(str(tmp_path / "exported")), batch, ROWS), expected, atol=2e-5)


@pytest.mark.parametrize("vision", ["frozen", pytest.param("trained", marks=pytest.mark.release)])
@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_steps_of_every_type_with_the_engine_of_transformers(kind, vision, tmp_path):
    if kind == "smolvlm":
        pytest.importorskip("num2words")  # its processor asks for it
    folder = str(vision_zoo.save(kind, tmp_path))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    many = cluster(folder, training_workers=2, engine="hf", settings={"vision": vision})
    # After an update qwen3_5 has log-probs that other micro-batches in one process change by up to 6e-5.
    steps = 3 if kind == KIND else 2 if vision == "trained" and "qwen3_5" not in kind else 1
    same_steps(local(folder, vision=vision), many, model, load_processor(folder), steps, rows=(ROWS, LONE))
    many.close()


IN_CI = [(KIND, {"vision": "trained"}, "vllm"), (KIND, {}, "hf"), (KIND, {"lora": {"rank": 4}}, "hf")]
FOR_RELEASE = [(kind, {"vision": vision}, "hf") for kind in vision_zoo.KINDS for vision in ("trained", "frozen")]
FOR_RELEASE += [(KIND, {}, "vllm"), (KIND, {"lora": {"rank": 4}}, "vllm")]


@pytest.mark.parametrize(
    ("kind", "settings", "engine"),
    [*IN_CI, *(pytest.param(*each, marks=pytest.mark.release) for each in FOR_RELEASE)],
)
def test_ranks_in_bfloat16(kind, settings, engine, tmp_path):
    """The part that sees moves as in float32, or keeps its bits in what is exported."""
    if kind == "smolvlm":
        pytest.importorskip("num2words")  # its processor asks for it
    folder = str((saved_to if engine == "vllm" else partial(vision_zoo.save, kind))(tmp_path / "model"))
    first = tower(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32))
    one = local(folder, **settings)
    many = cluster(folder, settings=settings, engine=engine, training_workers=2, mixed_precision="bfloat16")
    batch = sampled(many, load_processor(folder), 0, LONE)
    exact, rounded = (each.log_probs(batch) for each in (one, many))
    assert 1e-4 < (rounded - exact).abs().max() < 0.25
    norms = [each.update(with_advantages(batch, exact, exact), GRPO).grad_norm for each in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=0.25)  # as in fsdp_ranks
    many.sync_weights()
    many.save(tmp_path / "step")()
    many.close()
    export_model(tmp_path / "step" / "policy", tmp_path / "exported")
    found = tower(AutoModelForImageTextToText.from_pretrained(tmp_path / "exported"))
    assert found.keys() == first.keys()
    if settings.get("vision") != "trained":
        assert all(torch.equal(x, first[name]) for name, x in found.items())
        return
    ours, theirs = (
        torch.cat([(x - first[name]).flatten() for name, x in moved.items()]).detach()
        for moved in (found, tower(one.training.policy.module))
    )
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.9


def test_images_follow_their_rows_over_two_ranks(processor, two_ranks):
    """In any order of the rows; with the images of the first and the last pair exchanged these rows alone change."""
    batch = batch_of(processor, ROWS)
    expected = two_ranks.log_probs(batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    close(two_ranks.log_probs(batch[order]), expected[order])
    images = batch["images"].copy()
    images[[0, 1, 6, 7]] = images[[6, 7, 0, 1]]
    exchanged = DataProto.from_dict(dict(batch.batch.items()), {"images": list(images)})
    moved = (two_ranks.log_probs(exchanged) - expected).abs().amax(-1)
    assert (moved[[0, 1, 6, 7]] > 1e-3).all()
    assert (moved[2:6] < 1e-5).all()


def test_rows_that_are_sampled_through_a_sync_of_weights(processor, two_ranks):
    """The weights stay the same, so a request that goes on has the ranks' log-probs, with its images."""
    prompts, sampling = prompts_of(processor, ROWS), Sampling(max_new_tokens=60, ignore_eos=True)
    with two_ranks.stream(sampling, seed=7, prompt_width=80, over_updates=True) as stream:
        numbers = [stream.submit(prompts[i : i + 2]) for i in range(0, len(prompts), 2)]
        stream.take(0.0)
        version = two_ranks.weights_version
        two_ranks.sync_weights()
        answers = {}
        while len(answers) < len(numbers):
            answers |= stream.take()
    batch = DataProto.concat([answers[number] for number in numbers])
    assert (batch["weights_version"] == version).any()  # it began before
    close(two_ranks.log_probs(batch), batch["rollout_log_probs"], atol=2e-5)


def assert_compared(execution, model):
    """An engine tells of each tensor that it does not hold as it was sent, of both parts."""
    import ray

    sent = execution.rollouts.sent
    seeing = tower(model)
    assert seeing.keys() < sent.keys()
    (engine,) = execution.rollouts.workers
    assert ray.get(engine.mismatched_tensors.remote(sent)) == []
    for part in (seeing.keys(), sent.keys() - seeing.keys()):
        wrong = {name: (n, total + (name in part)) for name, (n, total) in sent.items()}
        assert len(ray.get(engine.mismatched_tensors.remote(wrong))) > 0.3 * len(part)


def test_a_sync_compares_the_part_that_sees(folder, two_ranks):
    assert_compared(two_ranks, AutoModelForImageTextToText.from_pretrained(folder))


@pytest.mark.skipif(not WITH_TORCHVISION, reason="vLLM needs torchvision for this type")
def test_three_steps_with_positions_of_three_dimensions(tmp_path):
    """The draws differ: the local sampler counts by the model's positions, in which an image has fewer than tokens."""
    folder = str(saved_to(tmp_path, "qwen2_5_vl"))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    execution = cluster(folder, training_workers=2)
    assert_compared(execution, model)
    same_steps(local(folder), execution, model, load_processor(folder), same_draws=False)
    execution.close()


@pytest.mark.skipif(WITH_TORCHVISION, reason="torchvision is installed")
def test_a_type_that_needs_torchvision_is_refused_without_it(tmp_path):
    with pytest.raises(ValueError, match=r"vLLM needs torchvision for qwen2_5_vl; install it"):
        cluster(str(saved_to(tmp_path, "qwen2_5_vl")))


def test_a_placeholder_is_never_sampled_and_has_no_share(folder, processor, tmp_path):
    """It would be the likeliest token; without it the other probabilities sum to 1."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    head = model.get_output_embeddings().weight.data
    for token in placeholders(model.config):
        head[token] = 5 * head[5:30].abs().max() * head[7].sign()
    model.save_pretrained(saved_to(tmp_path))
    execution = cluster(str(tmp_path))
    for sampling in (SAMPLING, Sampling(max_new_tokens=8, top_k=5)):
        batch = sampled(execution, processor, 0, sampling=sampling)
        assert not torch.isin(batch["responses"], torch.tensor(placeholders(model.config))).any()
        close(execution.log_probs(batch), batch["rollout_log_probs"], atol=2e-5)
    execution.close()


def test_a_checkpoint_of_two_ranks_resumed_and_exported(folder, processor, two_ranks, tmp_path):
    batch = sampled(two_ranks, processor, 5)
    reference = two_ranks.log_probs(batch, reference=True)
    two_ranks.update(with_advantages(batch, two_ranks.log_probs(batch), reference), GRPO)
    two_ranks.save(tmp_path / "step")()
    now = two_ranks.log_probs(batch)
    two_ranks.update(with_advantages(batch, now, reference), GRPO)
    assert (two_ranks.log_probs(batch) - now).abs().max() > 1e-4
    two_ranks.load(tmp_path / "step")
    assert torch.equal(two_ranks.log_probs(batch), now)
    export_model(tmp_path / "step" / "policy", tmp_path / "exported")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        close(each_alone(model, load_processor(str(tmp_path / "exported")), batch, ROWS), now, atol=2e-5)


def test_a_group_has_its_images_once_on_the_way_to_a_rank():
    from rlprims.execution.ray._worker_group import columns_of

    images = (bytes(torch.randint(0, 256, (100_000,), dtype=torch.uint8).tolist()),)
    tensors = {"response_mask": torch.ones(16, 4, dtype=torch.bool)}
    batch = DataProto.from_dict(tensors, {"images": [images] * 16, "text": ["x" * 100_000] * 16})
    sent = columns_of(batch, "tensors").select_idxs(np.arange(8))
    assert sent["images"].tolist() == [images] * 8
    assert 100_000 < len(pickle.dumps(sent)) < 110_000


def test_one_placeholder_for_each_image(processor):
    """Of what the processor of transformers has expanded."""
    text, images = "a{}b{}", [B, C]
    ids = read_by(processor, text, images)["input_ids"][0].tolist()
    marked = text.format(*[f"<begin>{processor.image_token}<end>"] * 2)
    blocks = [read_by(processor, "{}", [image])["input_ids"][0].tolist()[1:-1] for image in images]
    (placeholder,) = vision_zoo.tokenizer().encode(processor.image_token)
    assert collapsed(ids, blocks, placeholder) == vision_zoo.tokenizer().encode(marked)
    with pytest.raises(ValueError, match=r"image 1 of the prompt: expected its .* tokens"):
        collapsed(ids, [*blocks[:1], [0] * 3], placeholder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": {"vision": "none"}},
            "images: expected a model that sees, got idefics3 with vision: none",
        ),
        ({"settings": {"packing": True}}, "model.packing: true: not yet"),
        ({"algorithm": algorithms.ppo()}, "a critic: not yet"),
        ({"cpu_offload": True}, "ray.cpu_offload: not yet"),
        ({"tensor_parallel_size": 2}, "ray.tensor_parallel_size: not yet"),
        ({"training_workers": 2, "training_tensor_parallel": 2}, "ray.training_tensor_parallel: not yet"),
    ],
)
def test_what_no_test_has_is_refused_before_anything_starts(folder, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        cluster(folder, **changes)
    assert "\n" not in str(error.value)


def test_a_type_that_no_test_has_on_vllm_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vLLM is tested with .*, got qwen3_5; use ray\.engine: hf"):
        cluster(str(saved_to(tmp_path, "qwen3_5")))


def test_a_probe_has_no_placeholder():
    """Its log-prob is -inf. This tokenizer knows no word of the probe's text."""
    from rlprims.execution.ray._execution import _probe
    from tests.vision import made

    probe, special = _probe(made.tokenizer()), set(made.tokenizer().all_special_ids)
    assert len(set(probe)) >= 8
    assert not special & set(probe)
