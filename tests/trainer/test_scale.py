"""The formulas of a step beside what a CPU measures, what model cards say, and what others published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlprims.cli import main
from rlprims.plan.memory import activations
from rlprims.plan.scale import (
    Job,
    Rates,
    checkpoint,
    copies_sent,
    decode_bytes,
    exchanged_bytes,
    gathered_bytes,
    kv_bytes,
    phases,
    read_bytes,
    reduced_bytes,
    scored_bytes,
    step_seconds,
    summed_bytes,
    sync_bytes,
)
from rlprims.plan.sizes import Prompts, shape_of
from rlprims.trainer.config import Config
from tests.scale_measures import measures
from tools import scale_page
from tools.scale_page import PRIME_RL, QWEN3, QWEN3_4B, mfu, shape_with

RATES = Rates(flops=1e10, memory=1e9, network=1e8)


@pytest.mark.filterwarnings("ignore")
def test_formulas_are_within_a_quarter_of_what_is_measured() -> None:
    for measure in measures():
        assert 0.75 < measure.ratio < 1.25, measure


@pytest.mark.parametrize(
    ("name", "billions", "without_embeddings"), [("8B", 8.2, 6.95), ("32B", 32.8, 31.2)]
)  # of the model cards
def test_parameters_are_those_of_the_model_cards(name: str, billions: float, without_embeddings: float) -> None:
    shape = shape_with(QWEN3[name])
    assert round(shape.parameters / 1e9, 1) == billions
    assert shape.body / 1e9 == pytest.approx(without_embeddings, rel=0.005)


@pytest.mark.parametrize(("tokens", "rate", "published"), [case[1:4] for case in PRIME_RL])
def test_operations_are_those_of_prime_rl_s_mfu(tokens: int, rate: float, published: float) -> None:
    assert 100 * mfu(tokens, rate) == pytest.approx(published, rel=0.02)


def test_activations_grow_with_tokens_as_in_prime_rl_s_runs() -> None:
    """Layers recomputed in backward; a quarter is what these formulas claim."""
    planned = [activations(shape_with(QWEN3_4B), n, n, 2, True)[0].bytes for n in (16384, 65536)]
    assert planned[1] - planned[0] == pytest.approx((36.1 - 17.1) * 2**30, rel=0.25)


def test_the_page_is_of_today() -> None:
    assert scale_page.PAGE.read_text() == scale_page.page(), "run python -m tools.scale_page"


def test_scale_formulas_are_within_a_quarter_of_the_measured() -> None:
    found = json.loads(scale_page.MEASURED.read_text())
    assert len(found) == 18
    assert all(0.75 < each["by_formula"] / each["measured"] < 1.25 for each in found)


SHAPE = shape_with(QWEN3["8B"])


def test_bytes_between_ranks() -> None:
    assert gathered_bytes(SHAPE, 1, 2, 5) == reduced_bytes(SHAPE, 1, 1) == scored_bytes(SHAPE, 1, 2, 5) == 0
    # The table of docs/benchmarks/ranks.md: 2 layers of 164480 parameters, and 12583040 outside them; 4096 tokens.
    small = SHAPE._replace(parameters=12912000, trained=12912000, body=2 * 164480)
    for ranks, received in ((2, 12770), (4, 19155)):
        found = gathered_bytes(small, ranks, 4, 1) + reduced_bytes(small, ranks, 1)
        assert found / 4096 == pytest.approx(received, abs=0.5)


def test_bytes_between_copies_of_the_weights() -> None:
    """A ring: a rank's half of the gradients, 4 bytes each, less what is its own, there and back."""
    assert exchanged_bytes(SHAPE, 2, 1, 1) == 0
    assert exchanged_bytes(SHAPE, 2, 2, 1) == 2 * (1 / 2) * 4 * SHAPE.trained / 2
    assert exchanged_bytes(SHAPE, 2, 4, 3) == 3 * 2 * (3 / 4) * 4 * SHAPE.trained / 2


def test_bytes_between_ranks_that_divide_the_layers() -> None:
    """Two sums in a layer, of attention and of the MLP; by a ring of two each receives a half, there and back."""
    assert summed_bytes(SHAPE, 1, 100, 2, 3) == 0
    assert summed_bytes(SHAPE, 2, 100, 2, 1) == 36 * 2 * 100 * 4096 * 2
    assert summed_bytes(SHAPE, 4, 100, 2, 3) == 3 * 1.5 * summed_bytes(SHAPE, 2, 100, 2, 1)


def test_copies_that_leave_rank_0() -> None:
    assert [copies_sent(n) for n in (1, 2, 3, 4, 7, 8, 32)] == [1, 2, 2, 3, 3, 4, 6]


def test_decoding_reads_weights_once_a_step_and_every_cache_once_a_token() -> None:
    job = Job(rows=6, groups=1, prompt=10, response=4, longest=4)
    weights, token = read_bytes(SHAPE, 2), kv_bytes(SHAPE, 2)
    assert token == 147456  # 36 layers x 8 heads x 128 x 2 x 2 bytes
    assert decode_bytes(SHAPE, job, 6, 2) == 4 * weights + 6 * 4 * (10 + 2) * token
    assert decode_bytes(SHAPE, job, 2, 2) == 12 * weights + 6 * 4 * (10 + 2) * token  # three turns
    assert decode_bytes(SHAPE, job._replace(longest=100), 6, 2) - decode_bytes(SHAPE, job, 6, 2) == 96 * weights


@pytest.fixture
def job(settings: dict[str, Any]) -> dict[str, Any]:
    """8 prompts of 10 tokens, 4 samples of each, on two ranks and two engines."""
    algorithm = {"preset": "grpo", "kl_coef": 0.1, "group_size": 4}
    cluster = {"training_workers": 2, "rollout_workers": 2, "kv_cache_bytes": 2**18}
    cluster["reduce_gradients"] = "every_micro_batch"
    model = {**settings["model"], "device": "cpu"}
    job = {**settings, "algorithm": algorithm, "model": model, "prompts_per_step": 8, "prompts_per_generation": None}
    return {**job, "execution": "ray", "ray": cluster, "sampling": {"max_new_tokens": 64}}


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("sampling", "ray.rollout_workers=4"),
        ("sampling", "ray.kv_cache_bytes=8388608"),
        ("old log-probs", "ray.training_workers=4"),
        ("reference", "algorithm.kl_coef=0"),
        ("update", "ray.training_workers=4"),
        ("update", "model.max_tokens_per_micro_batch=1024"),
        ("update", "ray.reduce_gradients=once"),
        ("sync", "model.lora={rank: 2, sync: adapter}"),
        ("sync", "model.dtype=bfloat16"),
        ("recording", "record_rollouts=false"),
    ],
)
def test_each_setting_lowers_the_seconds_of_its_phase(
    load: Callable[..., Config], job: dict[str, Any], what: str, change: str
) -> None:
    def seconds(*changes: str) -> float:
        found = phases(load(job, *changes), Prompts(10, 10), Rates(flops=1e12, memory=1e9, network=1e8))
        return sum(phase.seconds or 0.0 for phase in found if phase.what == what)

    assert 0 <= seconds(change) < seconds()


def test_a_batch_ahead_hides_the_shorter_half(load: Callable[..., Config], job: dict[str, Any]) -> None:
    prompts = Prompts(10, 10)
    in_turn, ahead = (load(job, f"max_staleness={n}") for n in (0, 1))
    found = phases(in_turn, prompts, RATES)
    sampling = next(phase.seconds for phase in found if phase.what == "sampling")
    ranks = sum(phase.seconds or 0 for phase in found if phase.what in ("old log-probs", "reference", "update"))
    assert sampling
    assert step_seconds(in_turn, found) - step_seconds(ahead, found) == pytest.approx(min(sampling, ranks))


def test_a_checkpoint_by_hand(load: Callable[..., Config], job: dict[str, Any]) -> None:
    config = load(job)
    n = shape_of(config.model).parameters
    found = checkpoint(config, RATES._replace(disk=1e6))
    assert found.moved == 12 * n
    assert found.seconds == pytest.approx(12 * n / 2 / 1e6)  # of either rank, half of the shards
    every = checkpoint(load(job, "checkpoint.hugging_face=every"), RATES._replace(disk=1e6))
    assert every.moved == 16 * n
    assert every.seconds == pytest.approx((12 * n / 2 + 4 * n) / 1e6)  # then the trainer writes the model
    assert checkpoint(load({**job, "execution": "local"}), RATES).moved == 12 * n
    assert sync_bytes(shape_of(config.model), 4) == 4 * n


def test_the_command_prints_the_phases_where_the_rates_are_given(
    job: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table breaks its words
    path = str(write_config(job))
    assert main(["plan", path]) == 0
    assert "old log-probs" not in capsys.readouterr().out
    assert main(["plan", path, "--tflops", "400"]) == 2
    assert "--memory-bandwidth and --network" in capsys.readouterr().err
    assert main(["plan", path, "--tflops", "400", "--memory-bandwidth", "3000", "--network", "50", "--disk", "1"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("sampling", "old log-probs", "reference", "update", "sync", "checkpoint"))
