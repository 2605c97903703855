"""What costs minutes: the real compiler, and many random batches."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlprims.advantage import discounted_returns, gae, grpo, rloo
from rlprims.layout import pack
from rlprims.losses import clipped_surrogate, kl, seq_mean_token_mean, value_loss
from rlprims.rewards import at_last_token
from rlprims.testing import check_transforms
from rlprims.testing._checks import subject_of
from rlprims.testing._laws_compile import fake_tensors_are_enough, inductor_changes_nothing
from rlprims.testing._laws_tensors import replicated_tensors_work, row_sharded_tensors_work
from rlprims.testing._primitive import DIFFERENTIABLE, ESTIMATED_FROM, Primitive
from tests import records_transforms, test_laws

pytestmark = pytest.mark.slow


CHOSEN = (
    *("advantage.clip_advantages", "advantage.discounted_returns", "advantage.grpo"),
    *("losses.clipped_surrogate", "losses.dpo", "losses.full_kl", "losses.gspo", "losses.kl", "losses.load_balance"),
    *("losses.prompt_token_mean", "losses.token_mean", "losses.topk_kl", "losses.value_loss"),
    *("corrections.importance_weights", "corrections.rejection", "rewards.at_last_token", "rewards.cosine_length"),
    *("rewards.kl_penalty", "filters.kl_cov", "filters.varied_scores"),
    *("logprobs.entropy_from_logits", "logprobs.from_logits"),
    *("corrections.batch_normalized", "logprobs.from_hidden", "logprobs.fused_loss"),
    *("diagnostics.length_correlation", "diagnostics.ratio_stats"),
)
"""One of each kind of code and of arguments: CI compiles and exports these, and a release all others."""
RELEASE = pytest.mark.release


def is_chosen(record: test_laws.Record) -> bool:
    return record.name in CHOSEN and record is test_laws.FIRST_RECORDS[record.name]


@pytest.mark.laws
@pytest.mark.parametrize(
    "record", [pytest.param(r, marks=() if is_chosen(r) else RELEASE) for r in test_laws.RECORDS], ids=test_laws.label
)
def test_the_thorough_laws(record: test_laws.Record) -> None:
    test_laws.hold(record, "thorough")


@pytest.mark.laws
@pytest.mark.parametrize("record", [r for r in test_laws.RECORDS if not is_chosen(r)], ids=test_laws.label)
def test_the_laws_without_a_compiler(record: test_laws.Record) -> None:
    """The quick ones, which the first record has in test_laws; FakeTensors and DTensors."""
    if record is not test_laws.FIRST_RECORDS[record.name]:
        test_laws.hold(record)
    kind: Any = record.check.__name__.removeprefix("check_")
    subject: Any = subject_of(test_laws.function(record.name), kind, record.call)
    for law in (fake_tensors_are_enough, replicated_tensors_work, row_sharded_tensors_work):
        if law.__name__.replace("_", " ") not in record.exempt:
            law(subject)


@pytest.mark.laws
@pytest.mark.parametrize(
    "record",
    [pytest.param(r, marks=() if r["name"] in CHOSEN else RELEASE) for r in records_transforms.RECORDS],
    ids=lambda record: record["name"],
)
def test_the_thorough_laws_of_transforms(record: dict[str, Any]) -> None:
    check_transforms(record["fn"], exempt=record["exempt"], effort="thorough", inputs=record["inputs"])


OF_TWO_RANKS = (
    "losses.clipped_surrogate",
    "losses.gspo",
    "losses.token_mean",
    "advantage.gae",
    "rewards.at_last_token",
)


def primitive(name: str) -> Primitive:
    record = test_laws.FIRST_RECORDS[name]
    minimized = name.startswith("losses")
    return Primitive(
        test_laws.function(name),
        record.call,
        differentiable=DIFFERENTIABLE if minimized else (),
        transformed=() if minimized else ESTIMATED_FROM,
    )


@pytest.mark.parametrize(
    "name",
    [
        *("losses.clipped_surrogate", "advantage.rloo"),
        *(pytest.param(name, marks=RELEASE) for name in ("losses.token_mean", "advantage.gae")),
    ],
)
def test_inductor_changes_nothing(name: str) -> None:
    inductor_changes_nothing(primitive(name))


def test_rows_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_hold_on_this_rank, (2, str(tmp_path / "store")), nprocs=2)


def _hold_on_this_rank(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        for name in OF_TWO_RANKS:
            exempt: Mapping[str, str] = test_laws.FIRST_RECORDS[name].exempt
            for law in (replicated_tensors_work, row_sharded_tensors_work):
                if law.__name__.replace("_", " ") not in exempt:
                    law(primitive(name))
    finally:
        dist.destroy_process_group()


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    """Any mask, any groups, and lengths of the packed rows that hold every valid token."""
    rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    bits = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    mask = torch.tensor(bits).reshape(rows, width)
    needed = (mask * torch.arange(1, width + 1)).amax(-1)
    spare = torch.tensor(draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows)))
    ids = draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
    floats = torch.randn(7, rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    names = ("rewards", "values", "log_probs", "old_log_probs", "ref_log_probs", "advantages", "returns")
    return {
        **dict(zip(names, floats.double(), strict=True)),
        "response_mask": mask,
        "group_ids": torch.tensor(ids),
        "scores": floats[0, :, 0].double(),
        "lengths": torch.minimum(needed + spare, torch.tensor(width)),
    }


PRIMITIVES: list[tuple[Callable[..., Tensor], tuple[str, ...]]] = [
    (gae, ("rewards", "values", "response_mask")),
    (discounted_returns, ("rewards", "response_mask")),
    (grpo, ("rewards", "group_ids", "response_mask")),
    (rloo, ("rewards", "group_ids", "response_mask")),
    (at_last_token, ("scores", "response_mask")),
    (clipped_surrogate, ("log_probs", "old_log_probs", "advantages", "response_mask")),
]


@pytest.mark.parametrize(("fn", "names"), PRIMITIVES, ids=[fn.__name__ for fn, _ in PRIMITIVES])
@settings(max_examples=1_000)
@given(batch=batches())
def test_packed_equals_padded(fn: Callable[..., Tensor], names: tuple[str, ...], batch: dict[str, Tensor]) -> None:
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), batch["lengths"].cumsum(0)])
    data = {name: batch[name] for name in names}
    tokens = {name: pack(x, cu_seqlens) if x.dim() == 2 else x for name, x in data.items()}
    padded = fn(**data)
    torch.testing.assert_close(fn(**tokens, cu_seqlens=cu_seqlens), pack(padded, cu_seqlens), rtol=1e-12, atol=1e-12)
    assert (padded[~batch["response_mask"]] == 0).all()


def step(log_probs: Tensor, **data: Any) -> Tensor:
    """A loss with everything in it, for the compiler to fuse."""
    mask = data["response_mask"]
    advantages = grpo(data["rewards"], data["group_ids"], mask) + gae(data["rewards"], data["values"], mask)
    losses = clipped_surrogate(log_probs, data["old_log_probs"], advantages, mask, dual_clip=3.0)
    losses = losses + 0.1 * kl(log_probs, data["ref_log_probs"], mask, gradient="k2")
    losses = losses + value_loss(data["values"], data["values"], data["returns"], mask, clip=0.5)
    return seq_mean_token_mean(losses, mask)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=RELEASE)])
def test_the_compiler_changes_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (16, 100)
    names = ("rewards", "values", "old_log_probs", "ref_log_probs", "returns")
    data: dict[str, Tensor] = {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}
    data["response_mask"] = torch.rand(shape, generator=generator) < 0.7
    data["group_ids"] = torch.arange(16) // 4
    results = []
    for fn in (step, torch.compile(step, fullgraph=True)):
        log_probs = data["old_log_probs"].clone().requires_grad_()
        loss = fn(log_probs, **data)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        results.append((loss.detach(), gradient))
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
