"""One optimizer step over several ranks, and the same step in one process: the gradients are equal.

    torchrun --standalone --nproc-per-node 2 examples/several_ranks.py                 # DistributedDataParallel
    torchrun --standalone --nproc-per-node 2 examples/several_ranks.py --wrap fsdp2    # fully_shard

Every rank has different responses, of different lengths. It is a template for your own trainer: see docs/parallel.md.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rlprims import logprobs, losses
from rlprims.types import Totals

VOCABULARY, WIDTH = 11, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
    wrap = parser.parse_args().wrap
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)).to(device)
    alone = copy.deepcopy(policy)
    model = DistributedDataParallel(policy) if wrap == "ddp" else fully_shard(policy)

    # Each rank's share of the loss divides by the counts of the whole step, so the shares of all ranks sum to the loss.
    batch = responses(rank, device)
    totals = losses.count_totals(batch["response_mask"]).over_ranks()
    loss = step_loss(model, batch, totals)
    # The wrapper averages the gradients over the ranks, but the shares must be summed: multiply by the number of ranks.
    (loss * ranks).backward()
    if isinstance(model, FSDPModule):
        got = [gathered(parameter.grad) for parameter in model.parameters()]
    else:
        got = [parameter.grad for parameter in policy.parameters()]

    parts = [responses(other, device) for other in range(ranks)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in batch}
    step_loss(alone, whole, losses.count_totals(whole["response_mask"])).backward()
    for found, parameter in zip(got, alone.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
    if rank == 0:
        print(f"{wrap}: the gradients of {ranks} ranks are those of one process, {int(totals.tokens)} tokens in all")
    dist.barrier()  # if a rank ends while another still communicates, that one may hang
    dist.destroy_process_group()


def step_loss(model: nn.Module, batch: dict[str, Tensor], totals: Totals) -> Tensor:
    """The share of these rows in the token mean of the clipped surrogate over the whole step."""
    token_ids = batch["token_ids"]
    log_probs = logprobs.from_logits(model(token_ids.flatten()), token_ids.flatten()).view_as(token_ids)
    per_token = losses.clipped_surrogate(log_probs, log_probs.detach(), batch["advantages"], batch["response_mask"])
    return losses.token_mean(per_token, batch["response_mask"], totals=totals)


def gathered(gradient: Tensor | None) -> Tensor:
    """The whole gradient of a sharded parameter."""
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def responses(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The rows of a rank; a higher rank has longer rows."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(1, 4 + 4 * rank, (3, 1), generator=generator)
    batch = {
        "token_ids": torch.randint(VOCABULARY, (3, 8), generator=generator),
        "advantages": torch.randn(3, 1, generator=generator).expand(3, 8),
        "response_mask": torch.arange(8) < lengths,
    }
    return {name: x.to(device) for name, x in batch.items()}


if __name__ == "__main__":
    main()
