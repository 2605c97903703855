"""What a run with a GPU needs and a CPU can show: reports on the CPU, and the memory that an engine takes."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlprims import algorithms
from rlprims.execution import ModelConfig, OptimizerConfig, RayConfig, Sampling, UpdateReport
from rlprims.execution._ray_config import memory_options
from rlprims.execution.hf._micro_batches import SINGLE_PROCESS, Part, parts_of, with_counts
from rlprims.execution.hf._train_state import TrainState, optimizer_step
from rlprims.types import Correlation, Max, Mean
from tests import tiny
from tests.execution.execution_contract import local, prompts, training_batch


class OnDevice(Tensor):
    """A tensor of a device in disguise: all that is computed from it is there too, until it is brought to the CPU."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function in (Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__):
            OnDevice.waits += 1
        return result.as_subclass(Tensor) if function in (Tensor.cpu, Tensor.to) else result


def report_of(micro_batches: int) -> UpdateReport:
    state = TrainState(nn.Linear(3, 1), OptimizerConfig(), updates=1)

    def forward(data: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        losses = (state.module(data["x"]) ** 2).as_subclass(OnDevice)
        count = torch.ones(()).as_subclass(OnDevice)
        moments = Correlation(count, torch.zeros(2).as_subclass(OnDevice), torch.eye(2).as_subclass(OnDevice))
        metrics = {"mean": Mean(losses.detach().sum(), count), "max": Max(losses.detach().max()), "corr": moments}
        return losses.sum(), metrics

    parts = [Part([0, 1], {"x": torch.ones(2, 3)}, i == micro_batches - 1) for i in range(micro_batches)]
    OnDevice.waits = 0
    return optimizer_step(state, parts, {}, forward, SINGLE_PROCESS)


def test_optimizer_step_reports_on_the_cpu() -> None:
    report = report_of(2)
    assert all(type(x) is Tensor for metric in report.metrics.values() for x in vars(metric).values())
    assert type(report.loss) is float


def test_optimizer_step_does_not_wait_for_a_micro_batch() -> None:
    waits = []
    for micro_batches in (2, 12):
        report_of(micro_batches)
        waits.append(OnDevice.waits)
    assert waits[0] == waits[1] <= 2  # the losses of all, and the norm of the gradient


class Waits(TorchDispatchMode):
    """Counts the operations for which a process would wait for a GPU: numbers for Python, and sizes by content."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype is torch.bool for x in args[1])
        self.count += name in self.NAMES or by_mask
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused_head", "packing", "waits"), [(False, True, 0), (False, False, 2), (True, True, 1)])
def test_a_pass_over_a_micro_batch_waits_for_no_size(
    tmp_path: Path, fused_head: bool, packing: bool, waits: int
) -> None:
    """The fused head waits for the tokens of the loss; without packing transformers asks its mask twice."""
    execution: Any = local(
        tiny.save_model(tmp_path), algorithms.grpo(kl_coef=0.0), fused_head=fused_head, packing=packing
    )
    whole, totals = with_counts(training_batch(execution), algorithms.grpo(kl_coef=0.0))
    training = execution.training
    parts = list(parts_of(whole, training.model, SINGLE_PROCESS, packing=packing))
    for part in parts:
        with Waits() as counter:
            training._objective({**part.data, **totals}, algorithms.grpo(kl_coef=0.0))[0].backward()
        assert counter.count <= waits
        with Waits() as counter, torch.no_grad():
            training._policy_scorer().token_scores(part.data, ["log_probs", "entropies"])
        assert counter.count <= (0 if packing else 2)


def test_a_sampled_token_waits_twice(tmp_path: Path) -> None:
    """For the number of rows that go on, and where transformers asks whether a mask has padding."""
    execution: Any = local(tiny.save_model(tmp_path), algorithms.grpo(kl_coef=0.0))
    execution.training.policy.module.generation_config.eos_token_id = None
    execution.generation.end_ids = [10_000]  # no row ends
    counts = []
    for tokens in (4, 14):
        with Waits() as counter:
            execution.generate(prompts(), Sampling(max_new_tokens=tokens), seed=0, prompt_width=None)
        counts.append(counter.count)
    assert counts[1] - counts[0] <= 20


GB = 10**9


def test_memory_options_of_an_engine_with_a_device_of_its_own_leave_it_to_vllm() -> None:
    assert memory_options(79 * GB, 80 * GB, gpus=1.0, colocate=False) == {}
    assert memory_options(79 * GB, 80 * GB, gpus=2.0, colocate=False) == {}


def test_memory_options_share_a_device() -> None:
    half = memory_options(60 * GB, 80 * GB, gpus=0.5, colocate=False)["gpu_memory_utilization"]
    assert half == pytest.approx(0.46)  # two engines, or a rank and an engine, never exceed the device
    beside_a_context = memory_options(70 * GB, 80 * GB, gpus=1.0, colocate=True)["gpu_memory_utilization"]
    assert beside_a_context * 80 * GB <= 70 * GB
    assert memory_options(80 * GB, 80 * GB, gpus=1.0, colocate=True)["gpu_memory_utilization"] == 0.92


def test_memory_options_refuse_what_cannot_fit_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"takes 36\.8 GB, and of 80\.0 GB only 29\.2 are free.*utilization: 0\.36"):
        memory_options(30 * GB, 80 * GB, gpus=0.5, colocate=False)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("vocabulary", "sampling", "is_refused"),
    [
        (50_000, Sampling(top_p=0.9), True),
        (50_000, Sampling(min_p=0.1), True),
        (50_000, Sampling(top_p=0.9, top_k=100), False),
        (50_000, Sampling(), False),
        (1_000, Sampling(top_p=0.9), False),
    ],
)
def test_check_refuses_top_p_without_top_k_of_a_large_vocabulary(
    vocabulary: int, sampling: Sampling, is_refused: bool, tmp_path: Path
) -> None:
    from rlprims.execution.ray._checks import check

    tiny.config(vocab_size=vocabulary).save_pretrained(tmp_path)
    run: Any = {"algorithm": algorithms.grpo(kl_coef=0.0), "temperature": 1.0, "updates": 1}
    run["sampling"] = (Sampling(), sampling)  # of training, and of an evaluation
    with pytest.raises(ValueError, match=r"all 50000 tokens.*set sampling\.top_k") if is_refused else nullcontext():
        check(RayConfig(), ModelConfig(path=str(tmp_path), device="cpu"), run)
    # A GPU's runner returns the sets, but not of tokens that another model drafted.
    check(RayConfig(gpus_per_worker=1), ModelConfig(path=str(tmp_path), device="cpu"), run)
    drafted = RayConfig(gpus_per_worker=1, engine_options={"speculative_config": {}})
    with pytest.raises(ValueError, match=r"all 50000 tokens.*set sampling\.top_k") if is_refused else nullcontext():
        check(drafted, ModelConfig(path=str(tmp_path), device="cpu"), run)


@pytest.mark.ray
def test_check_refuses_a_quantized_engine_by_name(tmp_path: Path) -> None:
    from rlprims.execution.ray._checks import check_engine_options

    with pytest.raises(ValueError, match=r"engine_options: quantization: .*leave it out"):
        check_engine_options(RayConfig(engine_options={"quantization": "fp8"}), ModelConfig(path=str(tmp_path)))
