"""Sequences split over ranks: GAE, GSPO, and the gradients of the model are those of one process.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel.py

Each rank has a part of every sequence. The trainer chooses the parts: most trainers use zigzag parts for attention, and
the recurrence of GAE needs parts that follow each other. It is a template for your own trainer: see docs/parallel.md.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlprims import advantage, layout, logprobs, losses
from rlprims.types import SequenceShard, Totals

VOCABULARY, WIDTH = 11, 16


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    # A stand-in for the model. In a real one the trainer computes the attention between the parts (ring or all-to-all).
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)).to(device)
    alone = copy.deepcopy(model)
    lengths = torch.tensor([13, 8, 1], device=device)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    count = int(lengths.sum())
    token_ids = torch.randint(VOCABULARY, (count,), device=device)
    response_mask = torch.rand(count, device=device) < 0.8
    rewards, values = torch.randn(2, count, device=device)
    old_log_probs = -2.4 + 0.1 * torch.randn(count, device=device)

    # Advantages: parts that follow each other. For each sequence the ranks exchange two numbers, and no tokens.
    parts = layout.shards(lengths, ranks, "contiguous")
    here = parts[rank]
    shard = SequenceShard(part=rank, all_gather=all_gather)
    mine = [layout.cut_shards(x, parts)[rank] for x in (rewards, values, response_mask)]
    advantages = advantage.gae(*mine, here.cu_seqlens, gamma=0.99, lam=0.95, shard=shard)
    whole_advantages = advantage.gae(rewards, values, response_mask, cu_seqlens, gamma=0.99, lam=0.95)
    torch.testing.assert_close(advantages, layout.cut_shards(whole_advantages, parts)[rank])

    # The loss: any parts are possible, here zigzag.
    parts = layout.shards(lengths, ranks, "zigzag")
    names = ("token_ids", "advantages", "old_log_probs", "response_mask")
    whole = dict(zip(names, (token_ids, whole_advantages, old_log_probs, response_mask), strict=True))
    batch = {name: layout.cut_shards(x, parts)[rank] for name, x in whole.items()}
    batch["cu_seqlens"] = parts[rank].cu_seqlens
    # Counts of whole sequences. They are the same on all ranks that have parts of them: sum them over other ranks only.
    totals = losses.count_totals(batch["response_mask"], batch["cu_seqlens"], all_reduce_rows=all_reduce)
    loss = step_loss(model, batch, totals, sharded=True)
    # The ranks' shares sum to the loss. A wrapper that averages gradients over these ranks needs loss * ranks here.
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

    whole["cu_seqlens"] = cu_seqlens
    want = step_loss(alone, whole, losses.count_totals(response_mask, cu_seqlens), sharded=False)
    want.backward()
    torch.testing.assert_close(all_reduce(loss.detach()), want.detach())
    for found, parameter in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad)
    if rank == 0:
        print(f"context parallel: advantages, loss and gradients of {ranks} ranks are those of one process")
    dist.barrier()  # if a rank ends while another still communicates, that one may hang
    dist.destroy_process_group()


def step_loss(model: nn.Module, batch: dict[str, Tensor], totals: Totals, *, sharded: bool) -> Tensor:
    """GSPO with its paper's aggregation: the share of these tokens."""
    mask, cu_seqlens = batch["response_mask"], batch["cu_seqlens"]
    all_reduce_rows = all_reduce if sharded else None
    log_probs = logprobs.from_logits(model(batch["token_ids"]), batch["token_ids"])
    data = log_probs, batch["old_log_probs"], batch["advantages"], mask, cu_seqlens
    per_token = losses.gspo(*data, clip_low=0.2, clip_high=0.2, all_reduce_rows=all_reduce_rows)
    row_tokens = layout.sequence_lengths(mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    return losses.seq_mean_token_mean(per_token, mask, cu_seqlens, totals, row_tokens)


def all_reduce(x: Tensor) -> Tensor:
    """The sum over the ranks. If there are other dimensions, sum over the context-parallel group only."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.stack(found)


if __name__ == "__main__":
    main()
