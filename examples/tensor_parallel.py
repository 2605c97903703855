"""An LM head whose rows are divided over ranks: the loss, and all gradients, are those of one process.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py

Each rank has a part of the vocabulary, and all have the same tokens. No rank ever has the logits of the whole
vocabulary. It is a template for your own trainer: see docs/parallel.md.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlprims import logprobs, losses
from rlprims.types import VocabShard

VOCABULARY, WIDTH = 11, 16


def main() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)  # all ranks have the same layers, and the same batch
    body = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    head = nn.Parameter(torch.randn(VOCABULARY, WIDTH, device=device))
    token_ids = torch.randint(VOCABULARY, (4, 8), device=device)
    advantages = torch.randn(4, 1, device=device).expand(4, 8)
    response_mask = torch.arange(8, device=device) < torch.tensor([[8], [5], [2], [0]], device=device)
    alone, whole_head = copy.deepcopy(body), head.detach().clone().requires_grad_()

    # This rank's rows of the head. Their number may differ from rank to rank.
    borders = [VOCABULARY * i // ranks for i in range(ranks + 1)]
    rows = head.detach()[borders[rank] : borders[rank + 1]].clone().requires_grad_()
    vocab = VocabShard(start=borders[rank], size=VOCABULARY, all_reduce=all_reduce, all_reduce_max=all_reduce_max)

    # The loss is the same number on all ranks. Each rank gets the gradient of its own rows of the head, and the whole
    # gradient of the layers below, because the gradient of the hidden states is summed over the ranks.
    loss = step_loss(body(token_ids), rows, token_ids, advantages, response_mask, vocab)
    loss.backward()

    want = step_loss(alone(token_ids), whole_head, token_ids, advantages, response_mask, None)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(rows.grad, whole_head.grad[borders[rank] : borders[rank + 1]])
    for found, parameter in zip(body.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad)
    if rank == 0:
        print(f"tensor parallel: the loss and gradients of {ranks} ranks are those of one process")
    dist.barrier()  # if a rank ends while another still communicates, that one may hang
    dist.destroy_process_group()


def step_loss(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    vocab: VocabShard | None,
) -> Tensor:
    """The token mean of the clipped surrogate, with an entropy bonus."""
    log_probs, entropies = logprobs.from_hidden(hidden, head_weight, token_ids, vocab=vocab)
    per_token = losses.clipped_surrogate(log_probs, log_probs.detach(), advantages, response_mask)
    per_token = per_token + 0.01 * losses.negative_entropy(entropies, response_mask)
    return losses.token_mean(per_token, response_mask)


def all_reduce(x: Tensor) -> Tensor:
    """The sum over the ranks; where there are more dimensions than one, over the tensor-parallel group."""
    x = x.clone()
    dist.all_reduce(x)
    return x


def all_reduce_max(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


if __name__ == "__main__":
    main()
