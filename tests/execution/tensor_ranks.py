"""What test_execution_ranks.py runs on ranks that divide the layers, without Ray: two, or two times two."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm
from rlprims.batching import balance
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, RayConfig, UpdateReport
from rlprims.execution.hf import Training, export_model, with_counts
from rlprims.execution.hf._families import TENSOR_PARALLEL_MODELS
from rlprims.execution.hf._models import load_causal_lm
from rlprims.execution.ray import _checkpoint, _fsdp
from rlprims.execution.ray._checkpoint import Saver
from rlprims.types import merge_metrics
from tests.execution.execution_contract import OPTIMIZER, local, training_batch
from tests.execution.execution_families import build
from tests.execution.fsdp_ranks import GRPO, OBJECTIVES, assert_same, close, training

PPO = algorithms.ppo()
SMALL_STEPS = OPTIMIZER.model_copy(update={"lr": 1e-3})
"""With larger ones rounding grows from step to step, on FSDP2 ranks as well."""


def layouts() -> list[RayConfig]:
    """Every one that these ranks can have in groups of two."""
    size = dist.get_world_size()
    over = (None,) if size == 2 else (None, 2)
    return [RayConfig(training_workers=size, shard_over=each, training_tensor_parallel=2) for each in over]


def rows_of(batch: DataProto) -> list[int]:
    """Of this rank's group."""
    rows: list[int] = balance(batch["attention_mask"].sum(-1).tolist(), dist.get_world_size() // 2)[
        dist.get_rank() // 2
    ]
    return rows


def update(of: Training, batch: DataProto, algorithm: Algorithm, verb: str = "update") -> UpdateReport:
    """Of the whole batch by all groups, each of which reports once."""
    whole, totals = with_counts(batch, algorithm)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, getattr(of, verb)(whole.select_idxs(rows_of(batch)), algorithm, totals))
    assert [report.loss for report in reports[::2]] == [report.loss for report in reports[1::2]]
    metrics = merge_metrics(*(report.metrics for report in reports[::2]))
    report: UpdateReport = reports[0]._replace(loss=sum(report.loss for report in reports[::2]), metrics=metrics)
    return report


def update_alone(of: Training, batch: DataProto, algorithm: Algorithm, verb: str = "update") -> UpdateReport:
    whole, totals = with_counts(batch, algorithm)
    report: UpdateReport = getattr(of, verb)(whole, algorithm, totals)
    return report


def whole_weights(of: Training) -> dict[str, Tensor]:
    return {name: _fsdp.shard_of(p).whole() for name, p in of.policy.module.named_parameters()}


def assert_same_weights(ours: Training, expected: Training) -> None:
    theirs = whole_weights(expected)
    found = whole_weights(ours)
    assert found.keys() == theirs.keys()
    for name, x in found.items():
        close(x, theirs[name])


def steps(plain: Path, tied: Path, batch: DataProto) -> None:
    """Scores, losses, norms and weights after three steps are those of one process."""
    for cluster in layouts():
        for path, objective, packing, fused in (
            (plain, "token-wise", True, False),
            (plain, "token-wise", False, True),
            (tied, "token-wise", True, True),
            (tied, "of whole sequences", False, False),
            (tied, "with the entropy's gradient", True, True),
        ):
            algorithm, rows = OBJECTIVES[objective], rows_of(batch)
            options = {"packing": packing, "max_tokens_per_micro_batch": 60, "optimizer": SMALL_STEPS}
            one = training(path, algorithm, **options)
            many = training(path, algorithm, cluster, fused_head=fused, **options)
            part = batch.select_idxs(rows)
            close(many.log_probs(part, reference=True), one.log_probs(batch, reference=True)[rows])
            close(many.entropies(part), one.entropies(batch)[rows])
            for _ in range(3):
                torch.testing.assert_close(many.log_probs(part), one.log_probs(batch)[rows], rtol=1e-5, atol=1e-5)
                assert_same(update(many, batch, algorithm), update_alone(one, batch, algorithm))
            assert_same_weights(many, one)


def a_rank_holds_its_part(plain: Path) -> None:
    """A half of the layers, the embedding and the head; only norms and the biases of outputs are whole in a group."""
    for cluster in layouts():
        many = training(plain, GRPO, cluster)
        whole = parts = 0
        for p in many.policy.module.parameters():
            whole, parts = whole + p.numel(), parts + p.to_local().numel()  # type: ignore[operator]
        sharers = cluster.shard_over or dist.get_world_size()
        assert abs(parts * sharers / whole - 1) < 0.02, (parts, whole)


def settings(plain: Path, batch: DataProto) -> None:
    """What trades memory for time changes no number, nor does the number of reductions; bfloat16 only rounds."""
    expected = update_alone(training(plain, GRPO), batch, GRPO)
    for cluster in layouts():
        for changes in ({"activation_checkpointing": True}, {"reduce_gradients": "every_micro_batch"}):
            many = training(plain, GRPO, cluster.model_copy(update=changes), max_tokens_per_micro_batch=60)
            assert_same(update(many, batch, GRPO), expected)
        half = update_alone(training(plain, GRPO, dtype="bfloat16"), batch, GRPO)
        for of_cluster, model in (({}, {"dtype": "bfloat16"}), ({"mixed_precision": "bfloat16"}, {})):
            many = training(plain, GRPO, cluster.model_copy(update=of_cluster), max_tokens_per_micro_batch=60, **model)
            before = [p.to_local().clone() for p in many.policy.module.parameters()]  # type: ignore[operator]
            report = update(many, batch, GRPO)
            assert abs(report.grad_norm / half.grad_norm - 1) < 0.05, (report.grad_norm, half.grad_norm)
            for old, p in zip(before, many.policy.module.parameters(), strict=True):
                now = p.to_local()  # type: ignore[attr-defined]
                assert now.dtype is torch.float32
                assert not old.numel() or (now != old).any()


def save(saver: Saver, of: Training, folder: Path) -> None:
    """The shards, and a Hugging Face model of them."""
    saver.begin({"policy": of.policy}, folder)
    saver.result()
    dist.barrier()
    if dist.get_rank() == 0:
        export_model(folder / "policy", folder / "exported")
    dist.barrier()


def checkpoints(plain: Path, tied: Path, batch: DataProto, where: Path) -> None:
    """What a layout saves another loads, both ways; and the copy for Hugging Face is the whole model."""
    alone, saver = RayConfig(training_workers=dist.get_world_size()), Saver(timeout=60.0)
    for path in (plain, tied):
        for cluster in layouts():
            many, one = training(path, GRPO, cluster), training(path, GRPO)
            assert_same(update(many, batch, GRPO), update_alone(one, batch, GRPO))
            folder = where / f"{path.name}_{cluster.shard_over}"
            folder.mkdir(parents=True, exist_ok=True)
            save(saver, many, folder)
            copy: Any = load_causal_lm(str(folder / "exported"), ModelConfig(path=str(folder), device="cpu"))
            for name, x in copy.named_parameters():
                close(x.detach(), one.policy.module.get_parameter(name).detach())
            sharded = training(path, GRPO, alone)
            _checkpoint.load(sharded.policy, folder, "policy")
            assert_same_weights(sharded, many)
            back = folder / "back"
            back.mkdir(exist_ok=True)
            save(saver, sharded, back)
            again = training(path, GRPO, cluster)
            _checkpoint.load(again.policy, back, "policy")
            expected = update_alone(one, batch, GRPO)
            for of in (many, again):
                assert_same(update(of, batch, GRPO), expected)
            assert_same_weights(many, one)
            assert_same_weights(again, one)


def critic(plain: Path, batch: DataProto) -> None:
    """Its values, and its step."""
    rows = rows_of(batch)
    for cluster in layouts():
        one, many = training(plain, PPO), training(plain, PPO, cluster)
        close(many.values(batch.select_idxs(rows)), one.values(batch)[rows])
        data = batch.select(batch_keys=None)
        data["values"] = one.values(batch)
        data["returns"] = torch.randn(data["values"].shape, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            verb = "update_critic"
            assert_same(update(many, data, PPO, verb), update_alone(one, data, PPO, verb))
        close(many.values(batch.select_idxs(rows)), one.values(batch)[rows])


def families() -> None:
    """Logits and gradients of every type, with biases and norms of heads, are those of the whole model."""
    tokens = torch.arange(24).reshape(2, 12) % 29 + 1
    for cluster in layouts():
        ranks = _fsdp.ranks(cluster, dist.get_world_size(), "cpu")
        for kind in TENSOR_PARALLEL_MODELS:
            for ties in (False, True):
                sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": ties}
                expected: Any = build(kind, **sizes).float()
                divided: Any = ranks.shard(build(kind, **sizes).float())
                answers = []
                for module in (expected, divided):
                    logits = module(input_ids=tokens).logits
                    logits.log_softmax(-1)[..., 7].mean().backward()
                    answers.append(logits.detach())
                torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4, msg=lambda m, k=kind: f"{k}: {m}")
                theirs = dict(expected.named_parameters())
                assert [name for name, _ in divided.named_parameters()] == list(theirs)
                largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
                for name, p in divided.named_parameters():
                    if theirs[name].grad is not None:
                        torch.testing.assert_close(
                            p.grad.full_tensor(),
                            theirs[name].grad,
                            rtol=0,
                            atol=1e-5 * max(largest, 1.0),
                            msg=lambda m, k=f"{kind} {name}": f"{k}: {m}",
                        )


def main(path: Path, *chosen: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain, tied = path / "plain", path / "tied"
    batch = training_batch(local(tied, GRPO))  # whose vocabulary is the smaller one
    cases: dict[str, Callable[[], None]] = {
        "steps": lambda: steps(plain, tied, batch),
        "parts": lambda: a_rank_holds_its_part(plain),
        "settings": lambda: settings(plain, batch),
        "checkpoints": lambda: checkpoints(plain, tied, batch, path / "saved"),
        "critic": lambda: critic(plain, batch),
        "families": families,
    }
    for name in chosen or cases:
        cases[name]()
        if dist.get_rank() == 0:
            sys.stdout.write(f"passed: {name}\n")
    dist.barrier()
    if dist.get_rank() == 0 and not chosen:
        sys.stdout.write("passed: all\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
