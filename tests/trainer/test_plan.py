"""The arithmetic of `rlprims plan`: numbers worked by hand, and settings that lower what they are said to lower."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlprims.cli import main
from rlprims.plan.memory import Plan, plan, total
from rlprims.plan.sizes import Prompts, lengths_of, shape_of
from rlprims.trainer.config import Config

GRPO = {"preset": "grpo", "kl_coef": 0.0, "group_size": 4}
CLUSTER = {"execution": "ray", "ray": {"training_workers": 2, "rollout_workers": 2, "kv_cache_bytes": 2**20}}


@pytest.fixture
def job(settings: dict[str, Any]) -> dict[str, Any]:
    """8 prompts of 10 tokens, 4 samples of 8 tokens each, one update."""
    return {**settings, "algorithm": GRPO, "prompts_per_step": 8, "prompts_per_generation": None}


def lines(found: Plan) -> dict[str, float]:
    rank = [*found.rank, *found.sampling, *found.update, *found.saving, *found.sending]
    every = [*rank, *found.engine, *found.sync]
    return {line.what: line.bytes for line in every}


def test_numbers_by_hand(load: Callable[..., Config], job: dict[str, Any]) -> None:
    config = load({**job, "model": {"path": job["model"]["path"], "device": "cpu"}})
    model = AutoModelForCausalLM.from_pretrained(job["model"]["path"])
    n = model.num_parameters()
    found = lines(plan(config, Prompts(mean=10, longest=12, evaluated=5)))
    assert found["trained weights"] == found["gradients"] == found["optimizer"] / 2 == 4 * n
    # 2 layers; queries 2 x 32, keys 1 x 32, hidden 64, inner 128; 32 words.
    assert found["KV cache"] == 32 * (12 + 8) * (2 * 2 * 32 * 4)
    assert found["logits of a step"] == 4 * 32 * 32 * 4
    tokens = 8 * 10 + 32 * 8  # a shared prompt once
    assert found["activations"] == tokens * 2 * 4 * (6 * 64 + 64 + 4 * 128)
    assert found["inputs of attention"] == 32 * 18 * 2 * 4 * (64 + 32 + 32 + 64)
    assert found["logits"] == 4 * 256 * 32 * 4
    assert "reference" not in found


def test_a_peak_is_of_sampling_or_of_an_update(load: Callable[..., Config], job: dict[str, Any]) -> None:
    few, many = (plan(load(job), Prompts(10, 10, evaluated)) for evaluated in (1, 500))
    assert few.peak == total(few.rank) + total(few.update)
    assert many.peak == total(many.rank) + total(many.sampling) > few.peak


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("logits", ["model.fused_head=true", "sampling.max_new_tokens=1000000"]),
        ("logits", ["model.max_tokens_per_micro_batch=64"]),
        ("activations", ["model.max_tokens_per_micro_batch=64"]),
        ("inputs of attention", ["model.max_tokens_per_micro_batch=64"]),
        ("KV cache", ["model.max_rows_per_generation=4"]),
        ("KV cache", ["model.dtype=bfloat16"]),
        ("logits of a step", ["model.max_rows_per_generation=4"]),
        ("optimizer", ["model.lora={rank: 2}"]),
        ("gradients", ["model.lora={rank: 2}"]),
        ("reference", ["model.lora={rank: 2}"]),
        ("reference", ["algorithm.kl_coef=0"]),
    ],
)
def test_each_setting_lowers_what_the_table_says(
    load: Callable[..., Config], job: dict[str, Any], what: str, changes: list[str]
) -> None:
    values = {**job, "algorithm": {**GRPO, "kl_coef": 0.1}, "model": {"path": job["model"]["path"]}}
    prompts = Prompts(10, 10)
    before = lines(plan(load(values, *changes[1:]), prompts))[what]
    assert lines(plan(load(values, *changes), prompts)).get(what, 0.0) < before


def test_ranks_share_and_engines_do_not(load: Callable[..., Config], job: dict[str, Any]) -> None:
    model = {"path": job["model"]["path"], "device": "cpu"}
    one = lines(plan(load({**job, "model": model}), Prompts(10, 10)))
    found = plan(load({**job, **CLUSTER, "model": model}), Prompts(10, 10))
    two = lines(found)
    assert two["optimizer"] == one["optimizer"] / 2
    assert two["logits"] == one["logits"] / 2
    assert two["weights"] == two["sync, to each engine"] == one["trained weights"]
    assert two["sync, from each rank"] == two["weights"] / 2
    assert not found.sampling
    adapters = {**model, "lora": {"rank": 2, "sync": "adapter"}}
    sent = lines(plan(load({**job, **CLUSTER, "model": adapters}), Prompts(10, 10)))["sync, to each engine"]
    assert sent == 4 * shape_of(load({**job, "model": adapters}).model).trained < two["weights"] / 4


def test_teachers_on_ranks(load: Callable[..., Config], job: dict[str, Any]) -> None:
    path = job["model"]["path"]
    values = {**job, "algorithm": "opd", "model": {"path": path, "device": "cpu"}}
    size = 4 * shape_of(load(values).model).parameters
    assert lines(plan(load(values), Prompts(10, 10)))["teacher"] == size
    two = {**values, **CLUSTER, "data": {**job["data"], "teacher": "of"}}
    two["model"] = {**values["model"], "teacher": {"a": path, "b": path}}
    found = lines(plan(load(two), Prompts(10, 10)))
    assert found["teacher a"] == found["teacher b"] == size / 2
    pool = {**CLUSTER["ray"], "pools": {"apart": {}}, "roles": {"teacher": "apart"}}
    assert "teacher" not in lines(plan(load({**values, **CLUSTER, "ray": pool}), Prompts(10, 10)))


def test_a_copy_of_the_weights_on_two_of_four_ranks_is_divided_by_two(
    load: Callable[..., Config], job: dict[str, Any]
) -> None:
    model = {"path": job["model"]["path"], "device": "cpu"}
    two, four, hybrid = (
        lines(plan(load({**job, **CLUSTER, "model": model}, f"ray.training_workers={n}", *more), Prompts(10, 10)))
        for n, more in ((2, ()), (4, ()), (4, ("ray.shard_over=2",)))
    )
    for what in ("trained weights", "gradients", "optimizer", "snapshot"):
        assert hybrid[what] == two[what] == 2 * four[what]
    assert hybrid["logits"] == four["logits"], "each rank has a quarter of the rows"


def test_two_of_four_ranks_that_divide_the_layers_have_twice_the_rows_and_half_of_each(
    load: Callable[..., Config], job: dict[str, Any]
) -> None:
    model = {"path": job["model"]["path"], "device": "cpu"}
    four, divided = (
        lines(plan(load({**job, **CLUSTER, "model": model}, "ray.training_workers=4", *more), Prompts(10, 10)))
        for more in ((), ("ray.training_tensor_parallel=2",))
    )
    for what in ("trained weights", "gradients", "optimizer", "snapshot"):
        assert divided[what] == four[what]
    assert divided["logits"] == 2 * four["logits"], "each rank of two has all rows of both"
    assert divided["inputs of attention"] == four["inputs of attention"], "twice the rows, half of the heads"
    assert four["activations"] < divided["activations"] < 2 * four["activations"], "of hidden states all, twice"
    shape = shape_of(load({**job, "model": model}).model)
    embedding = 4 * shape.vocabulary * shape.hidden
    assert divided["gathered weights"] == pytest.approx(four["gathered weights"] / 2 + embedding)


def test_plan_counts_what_a_rank_holds_whole(load: Callable[..., Config], job: dict[str, Any]) -> None:
    values = {**job, **CLUSTER, "model": {"path": job["model"]["path"], "device": "cpu"}}
    shape, small = shape_of(load(values).model), "model.max_tokens_per_micro_batch=64"
    outside = 2 * 32 * 64 + 64  # embedding, head, the last norm
    assert shape.parameters - shape.body == outside
    one, several, every = (
        lines(plan(load(values, *changes), Prompts(10, 10)))
        for changes in ((), (small,), (small, "ray.reduce_gradients=every_micro_batch"))
    )
    assert several["whole gradients"] == 4 * shape.parameters
    assert one["whole gradients"] == every["whole gradients"] == 4 * outside
    assert one["gathered weights"] == 4 * (2 * shape.body / 2 + outside)  # all, as there are two layers


def test_sixteen_bits(load: Callable[..., Config], job: dict[str, Any]) -> None:
    """Trained weights are float32 beside them; ranks cast as they gather, one process holds both."""
    n = shape_of(load(job).model).parameters
    model = {"path": job["model"]["path"], "device": "cpu"}
    alone = lines(plan(load({**job, "model": {**model, "dtype": "bfloat16"}}), Prompts(10, 10)))
    assert (alone["weights in 16 bits"], alone["trained weights"], alone["optimizer"]) == (2 * n, 4 * n, 8 * n)
    for changes in ("model.dtype=bfloat16", "ray.mixed_precision=bfloat16"):
        ranks = lines(plan(load({**job, **CLUSTER, "model": model}, changes), Prompts(10, 10)))
        assert "weights in 16 bits" not in ranks
        assert ranks["trained weights"] == ranks["snapshot"] == 4 * n / 2
        assert ranks["weights"] == ranks["sync, to each engine"] == 2 * n


def test_engines_of_several_devices_in_a_pool(load: Callable[..., Config], job: dict[str, Any]) -> None:
    pool = {"tensor_parallel_size": 2, "pools": {"engines": {"workers": 4}}, "roles": {"rollout": "engines"}}
    model = {"path": job["model"]["path"], "device": "cuda"}
    ray = {**CLUSTER["ray"], **pool, "kv_cache_bytes": None}  # type: ignore[dict-item]
    found = lines(plan(load({**job, **CLUSTER, "ray": ray, "model": model}), Prompts(10, 10)))
    assert found["weights"] == 4 * shape_of(load(job).model).parameters / 2
    assert found["KV cache, if all run at once"] == 32 / 4 * 18 * (2 * 2 * 32 * 4) / 2
    assert "process" not in found


def test_prompts_are_those_of_the_data(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    config = load(settings)  # 20 sums; five questions of them are evaluated, two samples each
    found = lengths_of(config)
    assert 0 < found.mean <= found.longest
    assert found.evaluated == 10


def test_a_config_is_enough_of_a_model(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(Path(settings["model"]["path"]) / "config.json", tmp_path / "bare")
    path = str(write_config({**settings, "model": {"path": str(tmp_path / "bare")}}))
    assert main(["plan", path]) == 2
    assert "--prompt-tokens" in capsys.readouterr().err
    assert main(["plan", path, "--prompt-tokens", "100"]) == 0
    assert "peak" in capsys.readouterr().out
