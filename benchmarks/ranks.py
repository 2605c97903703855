"""One, two and four ranks beside one process: ``python -m benchmarks.ranks``, in ``.venv-ray``.

An update of FSDP2 ranks with the logits whole and with the head in tiles; and the head itself with its vocabulary in
shards. Each rank is a process with one thread that talks to the others by gloo. Ranks share the cores of the machine,
so that what is told of time is the CPU seconds of a rank.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import _machine
from benchmarks._harness import settle_allocator, with_peak
from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, RayConfig
from rlprims.execution.hf import Training, with_counts
from rlprims.logprobs import from_hidden
from rlprims.types import VocabShard

RESULTS = Path("docs/benchmarks/ranks.json")
VOCABULARY, TOKENS, WIDTH = 49152, 4096, 128
PROMPT, RESPONSE = 16, 256
GRPO = algorithms.grpo()
PAGE = """\
# Ranks beside one process

Measured by `python -m benchmarks.ranks` at {commit}; do not edit.

The model is a Qwen2 of two layers, width {width}, vocabulary
{vocabulary}, untied, in float32, with {tokens} response tokens on each rank. Each rank is a process with one
thread. All ranks run on one machine and communicate by gloo, so seconds are CPU seconds of rank 0. Peak is the
additional memory of rank 0. The logits of {tokens} tokens are {logits:.0f} MiB.

## An update of FSDP2 ranks

The update is GRPO with a KL to the reference. **Moved** is the bytes that a rank receives, per response token.
**Least** is the minimum for sharded weights: the parts of the other ranks, once of each weight and once of each
gradient. A layer is gathered a second time in the backward pass.

| ranks | head | peak MiB | CPU s | moved, B | least, B |
|---:|---|---:|---:|---:|---:|
{updates}

## The head, its vocabulary in shards

The case is `logprobs.from_hidden` with `vocab=`, and the gradients of hidden states and head. A rank has
{vocabulary} / ranks rows of the head, and all tokens. **Exchanged** is the bytes that a rank passes to the sums
and maxima in the forward pass, per token. **Least** is one number each for log Z, the token's logit and the
entropy. In the backward pass the gradient of hidden states is summed: {hidden} B. Gathering the logits would be
{gather} B. One rank without `vocab=` uses the kernel, which holds a tile of the logits; with shards a rank
holds the logits of its shard.

| ranks | | peak MiB | CPU s | exchanged, B | least, B |
|---:|---|---:|---:|---:|---:|
{heads}

{machine} · {versions} · {day}
"""


def update(model: Path, rank: int, ranks: int, head: str) -> dict[str, float]:
    """Of a rank with as many tokens as each has; ``alone`` is without FSDP2."""
    shared: dict[str, Any] = {}
    if head != "alone":
        from rlprims.execution.ray import _fsdp

        shared["ranks"] = _fsdp.ranks(RayConfig(), ranks, "cpu")
    config = ModelConfig(path=str(model), device="cpu", fused_head=head != "whole logits")
    training = Training(config, OptimizerConfig(), algorithm=GRPO, temperature=1.0, updates=1, **shared)
    batch = _batch(rank)
    whole, totals = with_counts(batch, GRPO)
    totals = {name: x._replace(tokens=x.tokens * ranks, sequences=x.sequences * ranks) for name, x in totals.items()}
    training.update(whole, GRPO, totals)  # allocates the optimizer's state
    weights = sum(p.numel() for p in training.policy.module.parameters()) * 4
    with _received() as received:
        measured = _measured(lambda: training.update(whole, GRPO, totals))
    if head != "alone" and ranks > 1 and not received[0]:
        raise RuntimeError("no bytes were counted: this version of torch has other collectives under FSDP2")
    least = 2 * weights * (ranks - 1) / ranks
    return measured | {"moved": received[0] / TOKENS, "least": least / TOKENS}


def head(model: Path, rank: int, ranks: int, how: str) -> dict[str, float]:
    """Log-probs and entropies, and their gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    given = [0]

    def reduced(x: Tensor, by: Any) -> Tensor:
        given[0] += x.nbytes
        x = x.clone()
        dist.all_reduce(x, by)
        return x

    rows = VOCABULARY // ranks
    mine = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    vocab = None
    if how == "shards":
        sums, largest = (lambda x, by=by: reduced(x, by) for by in (dist.ReduceOp.SUM, dist.ReduceOp.MAX))
        vocab = VocabShard(rank * rows, VOCABULARY, sums, largest)

    def run() -> None:
        scores = from_hidden(hidden, mine, ids, vocab=vocab)
        exchanged.append(given[0] / TOKENS)
        torch.autograd.grad(scores.log_probs.mean() + scores.entropies.mean(), (hidden, mine))

    exchanged: list[float] = []
    return _measured(run) | {"moved": exchanged[0], "least": 12 if ranks > 1 else 0}


CASES: dict[str, Callable[[Path, int, int, str], dict[str, float]]] = {"update": update, "head": head}
WHAT = {
    "update": [(1, "alone"), *((n, how) for n in (1, 2, 4) for how in ("whole logits", "in tiles"))],
    "head": [(1, "kernel"), (1, "shards"), (2, "shards"), (4, "shards")],
}


def _config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def _batch(rank: int) -> DataProto:
    rows, generator = TOKENS // RESPONSE, torch.Generator().manual_seed(rank)
    mask = torch.ones(rows, RESPONSE, dtype=torch.bool)

    def noise(scale: float) -> Tensor:
        return torch.randn(rows, RESPONSE, generator=generator) * scale

    return DataProto.from_dict(
        tensors={
            "prompts": torch.randint(2, VOCABULARY, (rows, PROMPT), generator=generator),
            "responses": torch.randint(2, VOCABULARY, (rows, RESPONSE), generator=generator),
            "attention_mask": torch.ones(rows, PROMPT + RESPONSE, dtype=torch.bool),
            "response_mask": mask,
            "group_ids": torch.arange(rows) // 8,
            "advantages": noise(1.0),
            "old_log_probs": noise(0.1) - 10.8,
            "ref_log_probs": noise(0.1) - 10.8,
        }
    )


def _measured(run: Callable[[], Any]) -> dict[str, float]:
    begun = process_time()
    _, peak = with_peak(run)
    return {"seconds": process_time() - begun, "peak": peak or 0.0}


@contextmanager
def _received() -> Iterator[list[float]]:
    """Bytes that this rank gets from the others in gathers of weights and sums of gradients, by the calls of FSDP2."""
    count, gather, scatter = [0.0], dist.all_gather_single, dist.reduce_scatter_single

    def received(x: Tensor) -> None:
        count[0] += x.nbytes * (dist.get_world_size() - 1) / dist.get_world_size()

    def gathered(*args: Any, **kwargs: Any) -> Any:
        received(args[0] if args else kwargs["output"])
        return gather(*args, **kwargs)

    def scattered(*args: Any, **kwargs: Any) -> Any:
        received(args[1] if len(args) > 1 else kwargs["input"])
        return scatter(*args, **kwargs)

    dist.all_gather_single, dist.reduce_scatter_single = gathered, scattered
    try:
        yield count
    finally:
        dist.all_gather_single, dist.reduce_scatter_single = gather, scatter


def _on_ranks(case: str, how: str, ranks: int, model: Path) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "benchmarks.ranks", "--worker", case, how, str(model)]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case}, {how}, {ranks} ranks: failed")
    found: dict[str, float] = json.loads(answers[0].splitlines()[-1])
    return found


def _work(case: str, how: str, model: Path) -> None:
    torch.set_num_threads(1)
    settle_allocator()
    dist.init_process_group("gloo")
    print(json.dumps(CASES[case](model, dist.get_rank(), dist.get_world_size(), how)))
    dist.barrier()
    dist.destroy_process_group()


def _row(ranks: int, how: str, found: dict[str, float]) -> str:
    moved = [f"{found[name]:.0f}" if ranks > 1 else "" for name in ("moved", "least")]
    return f"| {ranks} | {how} | {found['peak']:.0f} | {found['seconds']:.2f} | {moved[0]} | {moved[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description="Ranks beside one process.")
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "HOW", "MODEL"), help="what each rank is called with")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many (default: %(default)s)")
    parser.add_argument("--only", choices=CASES, help="one of the two tables")
    parser.add_argument("--out", type=Path, help=f"JSON file (default: {RESULTS}, for a whole run only)")
    options = parser.parse_args()
    if options.worker:
        case, how, model = options.worker
        _work(case, how, Path(model))
        return
    tables = dict[str, list[str]]()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        Qwen2ForCausalLM(_config()).save_pretrained(model)
        for case, wanted in WHAT.items():
            for ranks, how in wanted:
                if ranks not in options.ranks or options.only not in (None, case):
                    continue
                found = _on_ranks(case, how, ranks, model)
                results.append({"case": case, "how": how, "ranks": ranks} | found)
                tables.setdefault(case, []).append(_row(ranks, how, found))
                print(case, tables[case][-1], flush=True)
    whole = options.ranks == [1, 2, 4] and options.only is None
    if (out := options.out or (RESULTS if whole else None)) is None:
        return
    machine, versions = _machine.describe(), _machine.versions()
    page = PAGE.format(
        commit=machine["commit"],
        width=WIDTH,
        vocabulary=VOCABULARY,
        tokens=TOKENS,
        logits=TOKENS * VOCABULARY * 4 / 2**20,
        hidden=WIDTH * 4,
        gather=VOCABULARY * 4,
        updates="\n".join(tables.get("update", [])),
        heads="\n".join(tables.get("head", [])),
        machine=f"{machine['cpu']}, {machine['cores']} cores",
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        day=date.today().isoformat(),
    )
    facts = {"date": date.today().isoformat(), "machine": machine, "versions": versions, "rows": results}
    out.write_text(json.dumps(facts, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
