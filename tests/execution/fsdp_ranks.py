"""What test_execution_ranks.py runs on FSDP2 ranks, without Ray; each has some rows, and one process has all."""

import hashlib
import re
import resource
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlprims import algorithms, losses
from rlprims.algorithms import Algorithm, LossTerm, use
from rlprims.batching import balance
from rlprims.data_proto import DataProto
from rlprims.execution import LoraConfig, ModelConfig, OptimizerConfig, RayConfig, Sampling, UpdateReport
from rlprims.execution.hf import Training, export_model, with_counts
from rlprims.execution.hf._adapters import checksum, merged, parameters
from rlprims.execution.hf._families import SHARDED_MODELS
from rlprims.execution.hf._models import empty_causal_lm, load_causal_lm
from rlprims.execution.ray import _checkpoint, _fsdp
from rlprims.execution.ray._checkpoint import Saver
from rlprims.execution.ray._transfer import Source
from rlprims.kernels import linear_log_probs
from rlprims.types import merge_metrics
from tests.execution.execution_contract import LIMIT, OPTIMIZER, WIDTH, local, prompts, training_batch
from tests.execution.execution_families import FAMILIES, build

GRPO = algorithms.grpo()
ENTROPY = LossTerm(coefficient=0.05, loss=use(losses.negative_entropy))
OBJECTIVES = {
    "token-wise": GRPO,
    "of whole sequences": algorithms.gspo().replace(loss_terms=GRPO.loss_terms),
    "with the entropy's gradient": GRPO.replace(loss_terms=[*GRPO.loss_terms, ENTROPY]),
}
WIDE = 4096
"""The vocabulary of a model whose logits are larger than all its weights."""


def training(path: Path, algorithm: Algorithm, cluster: RayConfig | None = None, **model: Any) -> Training:
    """Of this rank; without a cluster of this process alone."""
    dtype = model.get("dtype")
    shared = {} if cluster is None else {"ranks": _fsdp.ranks(cluster, dist.get_world_size(), "cpu", dtype)}
    optimizer = model.pop("optimizer", OPTIMIZER)
    config = ModelConfig(path=str(path), device="cpu", **model)
    return Training(config, optimizer, algorithm=algorithm, temperature=0.8, updates=10, **shared)


def rows_of(batch: DataProto) -> list[int]:
    """Of this rank; the other has more or fewer."""
    rows: list[int] = balance(batch["attention_mask"].sum(-1).tolist(), dist.get_world_size())[dist.get_rank()]
    return rows


def update(of: Training, batch: DataProto, algorithm: Algorithm, rows: list[int] | None = None) -> UpdateReport:
    """Of the whole batch, or of these rows of it."""
    whole, totals = with_counts(batch, algorithm)
    if rows is None:
        return of.update(whole, algorithm, totals)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, of.update(whole.select_idxs(rows), algorithm, totals))
    metrics = merge_metrics(*(report.metrics for report in reports))
    report: UpdateReport = reports[0]._replace(loss=sum(report.loss for report in reports), metrics=metrics)
    return report


def assert_same(ours: UpdateReport, expected: UpdateReport, rel: float = 1e-5) -> None:
    assert ours.loss == pytest.approx(expected.loss, rel=rel, abs=rel)
    assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=rel)
    assert ours.metrics.keys() == expected.metrics.keys()
    for name, metric in expected.metrics.items():
        assert float(ours.metrics[name].value()) == pytest.approx(float(metric.value()), rel=10 * rel, abs=rel), name


class Reductions(TorchDispatchMode):
    """How many there are of gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def largest_tensor(compute: Callable[[], Any]) -> int:
    """The most bytes that are asked for at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def the_head_in_tiles(path: Path, tied: Path, batch: DataProto, kept: DataProto) -> None:
    """Scores, losses, gradients and metrics are those of one process with whole logits, whatever the objective."""
    for where, data, name, packing in (
        (path, batch, "token-wise", True),
        (tied, kept, "token-wise", True),
        (tied, kept, "of whole sequences", True),
        (path, batch, "with the entropy's gradient", False),
    ):
        algorithm, rows = OBJECTIVES[name], rows_of(data)
        part = data.select_idxs(rows)
        options = {"packing": packing, "max_tokens_per_micro_batch": 60}
        one, many = (
            training(where, algorithm, **options),
            training(where, algorithm, RayConfig(), fused_head=True, **options),
        )
        for reference in (False, True):
            close(many.log_probs(part, reference=reference), one.log_probs(data, reference=reference)[rows])
        close(many.entropies(part), one.entropies(data)[rows])
        for _ in range(2):
            assert_same(update(many, data, algorithm, rows), update(one, data, algorithm))


def no_whole_logits(path: Path, batch: DataProto) -> None:
    """Nothing is as large as a fifth of the logits, where all of them were held at once."""
    linear_log_probs._CPU_ELEMENTS = 4 * WIDE
    large = DataProto.concat([batch] * 16)
    large["group_ids"] = torch.arange(len(large)) // 2
    rows = rows_of(large)
    part = large.select_idxs(rows)
    logits = int(part["response_mask"].sum()) * WIDE * 4
    for fused, name in ((False, "token-wise"), *((True, name) for name in OBJECTIVES)):
        many = training(path, OBJECTIVES[name], RayConfig(), fused_head=fused)
        for verb, compute in {
            "log_probs": partial(many.log_probs, part),
            "reference": partial(many.log_probs, part, reference=True),
            "entropies": partial(many.entropies, part),
            "update": partial(update, many, large, OBJECTIVES[name], rows),
        }.items():
            most = largest_tensor(compute)
            assert most < logits / 5 if fused else most >= logits, (name, fused, verb, most / logits)


def one_reduction(path: Path, batch: DataProto) -> None:
    """Of each group of weights for an update, however many micro-batches; the step is the same."""
    rows, counts, reports = rows_of(batch), [], []
    for settings in ({"max_tokens_per_micro_batch": 1000}, {}, {"reduce_gradients": "every_micro_batch"}):
        budget = settings.pop("max_tokens_per_micro_batch", 60)
        many = training(path, GRPO, RayConfig(**settings), fused_head=True, max_tokens_per_micro_batch=budget)
        with Reductions() as reductions:
            reports.append(update(many, batch, GRPO, rows))
        counts.append(reductions.count)
    assert counts[0] == counts[1] == 3, counts  # two layers, and what is outside them
    assert counts[2] in (6, 9, 12, 15), counts  # as often as there are micro-batches
    for report in reports[1:]:
        assert_same(report, reports[0])


def settings(path: Path, batch: DataProto) -> None:
    """What trades memory for time changes no number, and bfloat16 does by its rounding."""
    rows, expected = rows_of(batch), update(training(path, GRPO), batch, GRPO)
    recomputes = RayConfig(activation_checkpointing=True)
    many = training(path, GRPO, recomputes, fused_head=True, max_tokens_per_micro_batch=60)
    assert_same(update(many, batch, GRPO, rows), expected)


def sixteen_bits(path: Path, batch: DataProto) -> None:
    """Computed in bfloat16, with float32 weights: a step that bfloat16 cannot represent is made, by every weight."""
    rows, tiny_steps = rows_of(batch), OptimizerConfig(lr=1e-6, weight_decay=0.0)
    exact = update(training(path, GRPO), batch, GRPO)
    half = update(training(path, GRPO, dtype="bfloat16"), batch, GRPO)
    for cluster, model in (({}, {"dtype": "bfloat16"}), ({"mixed_precision": "bfloat16"}, {})):
        many = training(path, GRPO, RayConfig(**cluster), fused_head=True, optimizer=tiny_steps, **model)
        before = [p.to_local().clone() for p in many.policy.module.parameters()]  # type: ignore[operator]
        report = update(many, batch, GRPO, rows)
        assert report.grad_norm == pytest.approx(half.grad_norm, rel=0.02)
        # Off by 0.01 where bfloat16 is emulated, by 0.12 on a processor that has it, which rounds more often.
        assert report.grad_norm == pytest.approx(exact.grad_norm, rel=0.25)
        assert report.grad_norm != pytest.approx(exact.grad_norm, rel=1e-4)
        for old, p in zip(before, many.policy.module.parameters(), strict=True):
            gradient_was_there = old.numel() and p.dim() > 1
            now = p.to_local()  # type: ignore[attr-defined]
            assert now.dtype is torch.float32
            assert not gradient_was_there or (now != old).float().mean() > 0.5


def parts_of_files(path: Path) -> None:
    """Every rank reads its own part of the files, whatever the type, and has what it would have cut from the whole."""
    ranks = _fsdp.ranks(RayConfig(), dist.get_world_size(), "cpu")
    for kind in (*FAMILIES, "tied"):
        folder = path / kind
        if kind != "tied" and dist.get_rank() == 0:
            build(kind).bfloat16().save_pretrained(folder)
        dist.barrier()
        config = ModelConfig(path=str(folder), device="cpu")
        expected: Any = load_causal_lm(str(folder), config)
        empty = empty_causal_lm(str(folder), config)
        assert (empty is None) == (kind not in (*SHARDED_MODELS, "tied")), kind
        assert empty is None or all(x.is_meta for x in empty.parameters())
        loaded: Any = ranks.load(str(folder), config)
        theirs = dict(expected.named_parameters())
        assert [name for name, _ in loaded.named_parameters()] == list(theirs)
        for name, x in loaded.named_parameters():
            assert x.requires_grad
            assert torch.equal(x.full_tensor(), theirs[name]), (kind, name)
        for (name, x), (_, y) in zip(loaded.named_buffers(), expected.named_buffers(), strict=True):
            assert torch.equal(x, y), (kind, name)
        assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
        assert loaded.config.to_dict() == expected.config.to_dict()
        tokens = torch.arange(2, 10)[None]
        close(loaded(input_ids=tokens).logits, expected(input_ids=tokens).logits)


def full_disk(path: Path, where: Path) -> None:
    """Of one rank: every rank says which, where and why, in a line."""
    many = training(path, GRPO, RayConfig())
    where.mkdir(exist_ok=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        saver = Saver(timeout=60.0)
        saver.begin({"policy": many.policy}, where)
        with pytest.raises(OSError, match=re.escape(f"{where}: rank 1: ") + ".*File too large") as told:
            saver.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(told.value)


def save(of: Training, where: Path) -> None:
    saver = Saver(timeout=60.0)
    saver.begin({"policy": of.policy}, where)
    saver.result()
    dist.barrier()


def in_the_background(path: Path, batch: DataProto, where: Path, *, files: int = 2, **model: Any) -> None:
    """What is written later is the state of the call: updates meanwhile change nothing of it, and are repeated."""
    _checkpoint.FILE_BYTES = 1 << (28 if files == 2 else 16)
    rows, many, saver = rows_of(batch), training(path, GRPO, RayConfig(), **model), Saver(timeout=60.0)
    update(many, batch, GRPO, rows)
    expected = whole_weights(many)
    gate = threading.Event()
    saver._thread.submit(gate.wait)  # nothing is written before the updates
    saver.begin({"policy": many.policy}, where / "first")
    reports = [update(many, batch, GRPO, rows) for _ in range(2)]
    assert saver.is_writing
    gate.set()
    hashes = [saver.result()]
    saver.begin({"policy": many.policy}, where / "second")  # and another at once
    hashes.append(saver.result())
    for folder, found in zip(("first", "second"), hashes, strict=True):
        assert len(found) == files  # of this rank's weights and moments
        for name, expected_hash in found.items():
            assert hashlib.sha256((where / folder / name).read_bytes()).hexdigest() == expected_hash
    dist.barrier()
    if dist.get_rank() == 0:
        export_model(where / "first" / "policy", where / "exported")
        assert not list(where.rglob("*.pt")) + list(where.rglob("*.pkl")) + list(where.rglob(".metadata"))
    dist.barrier()
    plain: Any = load_causal_lm(str(where / "exported"), ModelConfig(path="", device="cpu"))
    found = dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name
    after = whole_weights(many)
    _checkpoint.load(many.policy, where / "first", "policy")
    again = [update(many, batch, GRPO, rows) for _ in range(2)]
    assert [(r.loss, r.grad_norm, r.lr) for r in again] == [(r.loss, r.grad_norm, r.lr) for r in reports]
    _checkpoint.load(many.policy, where / "second", "policy")
    for name, x in whole_weights(many).items():
        assert torch.equal(after[name], x), name


def whole_weights(of: Training) -> dict[str, Tensor]:
    """Of the plain model, with adapters merged."""
    module = of.policy.module
    module.reshard()  # type: ignore[operator]
    return merged(module, {name: _fsdp.whole(p) for name, p in parameters(module).items()})


def sent_in_sixteen_bits(path: Path) -> None:
    """Engines get the rounded weights, with adapters the rounded sums; without them half as many bytes are gathered."""
    for model in ({}, {"lora": LoraConfig(rank=4)}):
        many = training(path, GRPO, RayConfig(), **model)
        module = many.policy.module
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                torch.nn.init.constant_(parameter, 0.01)
        whole = whole_weights(many)
        shards = {name: _fsdp.shard_of(parameter) for name, parameter in parameters(module).items()}
        source = Source(module, shards, "bfloat16")
        with patch.object(DTensor, "full_tensor", autospec=True, side_effect=DTensor.full_tensor) as gather:
            sent = {info.name: x.bfloat16() for infos, part in source for info, x in zip(infos, part, strict=True)}
        assert sent.keys() == whole.keys()
        for name, x in sent.items():
            assert torch.equal(x, whole[name].bfloat16()), name
        gathered = {call.args[0].dtype for call in gather.call_args_list}
        assert gathered == {torch.float32 if model else torch.bfloat16}


def hybrid(path: Path, batch: DataProto, where: Path) -> None:
    """Two copies of the weights on four ranks: the step of one process, and a checkpoint that four shards read."""
    rows, one = rows_of(batch), training(path, GRPO)
    cluster = RayConfig(training_workers=4, shard_over=2)
    many = training(path, GRPO, cluster, fused_head=True, max_tokens_per_micro_batch=60)
    for p in many.policy.module.parameters():
        assert p.device_mesh.shape == (2, 2)  # type: ignore[attr-defined]
    whole, parts = (sum(p.numel() for p in each) for each in (one.policy.module.parameters(), local_parts(many)))
    assert parts == pytest.approx(whole / 2, rel=0.02)
    close(many.log_probs(batch.select_idxs(rows)), one.log_probs(batch)[rows])
    for _ in range(2):
        assert_same(update(many, batch, GRPO, rows), update(one, batch, GRPO))
    where.mkdir(exist_ok=True)
    save(many, where)
    alone = training(path, GRPO, RayConfig(training_workers=4))
    _checkpoint.load(alone.policy, where, "policy")
    for theirs, ours in zip(many.policy.module.parameters(), alone.policy.module.parameters(), strict=True):
        assert torch.equal(_fsdp.shard_of(theirs).whole(), _fsdp.shard_of(ours).whole())
    assert_same(update(alone, batch, GRPO, rows), update(one, batch, GRPO))
    adapted = [training(path, GRPO, each, lora=LoraConfig(rank=4)).policy.module for each in (None, cluster)]
    assert _checkpoint.checksum(adapted[1]) == checksum(adapted[0])


def local_parts(of: Training) -> list[Tensor]:
    return [p.to_local() for p in of.policy.module.parameters()]  # type: ignore[operator]


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def main(path: Path, *chosen: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, tied, wide = (path / name for name in ("plain", "tied", "wide"))
    sampler = local(plain, GRPO)
    batch = training_batch(sampler)
    kept = sampler.generate(prompts(), Sampling(max_new_tokens=LIMIT, top_p=0.8), seed=0, prompt_width=WIDTH)
    kept = kept.union(training_batch(sampler).select(batch_keys=["group_ids", "advantages"]))
    kept["old_log_probs"] = kept["rollout_log_probs"] + 0.1
    kept["ref_log_probs"] = kept["rollout_log_probs"] - 0.1
    cases: dict[str, Callable[[], None]] = {
        "the head in tiles": lambda: the_head_in_tiles(plain, tied, batch, kept),
        "one reduction": lambda: one_reduction(plain, batch),
        "settings": lambda: settings(plain, batch),
        "sixteen bits": lambda: sixteen_bits(plain, batch),
        "sent in sixteen bits": lambda: sent_in_sixteen_bits(plain),
        "parts of files": lambda: parts_of_files(path),
        "in the background": lambda: in_the_background(plain, batch, path / "background", files=8),
        "in the background, tied": lambda: in_the_background(tied, batch, path / "background-tied"),
        "in the background, adapters": lambda: in_the_background(
            tied, batch, path / "background-lora", lora=LoraConfig(rank=4)
        ),
        "full disk": lambda: full_disk(plain, path / "saved"),
        "no whole logits": lambda: no_whole_logits(wide, batch),
    }
    of_four = {"hybrid sharding": lambda: hybrid(plain, batch, path / "hybrid")}
    for name in chosen or cases:
        (cases | of_four)[name]()
        if dist.get_rank() == 0:
            sys.stdout.write(f"passed: {name}\n")
    dist.barrier()
    if dist.get_rank() == 0 and not chosen:
        sys.stdout.write("passed: all\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
