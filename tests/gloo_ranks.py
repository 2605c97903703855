"""What test_several_ranks.py runs on four ranks: groups of 1, 2 and 4 of them against a rank that has all.

The cases that threads cover by the hundred (test_sharded_*.py) meet real collectives here, in forward and in backward.
"""

import re
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from examples.dtensor_vocab import vocab_of
from rlprims import advantage, corrections, filters, layout, losses
from rlprims.logprobs import from_hidden, from_logits, from_logits_with_entropy, fused_loss
from rlprims.types import SamplingSupport, SequenceShard, VocabShard

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


class Ranks:
    """The first n ranks."""

    def __init__(self, n: int) -> None:
        self.group, self.count, self.rank = dist.new_group(list(range(n))), n, dist.get_rank()

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(found, x, group=self.group)
        return torch.stack(found)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(f: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    """The value, and the gradient of each leaf."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
    value = f(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


def a_vocabulary(ranks: Ranks) -> None:
    size = 13
    borders = [*[0, 1, 8, 11][: ranks.count], size]
    part = slice(borders[ranks.rank], borders[ranks.rank + 1])
    vocab = VocabShard(part.start, size, ranks.all_reduce, ranks.all_reduce_max)
    hidden, head, ids, mask = (
        random(2, 3, 4),
        random(size, 4, seed=1),
        torch.arange(6).reshape(2, 3) * 2,
        torch.ones(2, 3),
    )
    mask = mask.bool()
    allowed = (random(6, size, seed=2) > 0).scatter(1, ids.reshape(6, 1), True)
    kept = SamplingSupport.from_counts(allowed.nonzero()[:, 1], allowed.sum(1))

    def scores(h: Tensor, w: Tensor, vocab: VocabShard | None) -> Tensor:
        log_probs, entropies = from_hidden(h, w, ids, kept, temperature=0.7, vocab=vocab)
        return (log_probs.square() + entropies.square()).sum()

    def fused(h: Tensor, w: Tensor, vocab: VocabShard | None) -> Tensor:
        return fused_loss(h, w, ids, mask / 6, mask, losses.nll, {}, vocab=vocab).loss

    for f in (scores, fused):
        got, want = (
            gradients(partial(f, vocab=vocab), hidden, head[part]),
            gradients(partial(f, vocab=None), hidden, head),
        )
        close(got, (want[0], want[1], want[2][part]))

    logits, teacher = 5 * random(2, 3, size), 5 * random(2, 3, size, seed=1)
    for divergence in (losses.full_kl, partial(losses.full_kl, direction="forward"), partial(losses.jsd, beta=0.3)):
        got = gradients(lambda x, f=divergence: f(x, teacher[..., part], mask, vocab=vocab).sum(), logits[..., part])
        want = gradients(lambda x, f=divergence: f(x, teacher, mask).sum(), logits)
        close(got, (want[0], want[1][..., part]))

    sick = logits.clone()
    sick[0, 0, size - 1], sick[0, 1, 0] = torch.nan, torch.inf
    close(
        from_logits_with_entropy(sick[..., part], ids, vocab=vocab), from_logits_with_entropy(sick, ids), equal_nan=True
    )


def sequences(ranks: Ranks) -> None:
    """The third has one token, which most ranks lack; the last rank has no valid token at all."""
    lengths = torch.tensor([12, 7, 1])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    new, old, a = (0.2 * random(20, seed=i) for i in range(3))
    for cut in ("zigzag", "contiguous"):
        parts = layout.shards(lengths, ranks.count, cut)
        tokens, borders = parts[ranks.rank]
        mask = torch.arange(20) % 3 > 0
        if ranks.count > 1:
            mask = mask.index_fill(0, parts[-1].tokens, False)
        for loss in (losses.gspo, losses.gmpo, losses.opmd, losses.topr, losses.vespo):
            want = gradients(partial(share, loss, data=(old, a, mask, cu_seqlens)), new)
            data = old[tokens], a[tokens], mask[tokens], borders
            got = gradients(partial(share, loss, data=data, all_reduce_rows=ranks.all_reduce), new[tokens])
            close(ranks.all_reduce(got[0]), want[0])
            close(got[1], want[1][tokens])
        if cut == "contiguous":
            shard = SequenceShard(ranks.rank, ranks.all_gather)
            got = advantage.gae(new[tokens], old[tokens], mask[tokens], borders, gamma=0.9, shard=shard)
            close(got, advantage.gae(new, old, mask, cu_seqlens, gamma=0.9)[tokens])


def share(
    loss: Callable[..., Tensor], log_probs: Tensor, *, data: tuple[Tensor, ...], **options: Callable[[Tensor], Tensor]
) -> Tensor:
    """These tokens' share of the mean over sequences of means over tokens."""
    *_, mask, cu_seqlens = data
    totals = losses.count_totals(mask, cu_seqlens, **options)
    row_tokens = layout.sequence_lengths(mask, cu_seqlens, **options)
    return losses.seq_mean_token_mean(loss(log_probs, *data, **options), mask, cu_seqlens, totals, row_tokens)


def a_batch(ranks: Ranks) -> None:
    """Statistics and thresholds of all ranks; the last of several has a row without a valid token."""
    x, y, mask = random(8, 5), random(8, 5, seed=1), random(8, 5, seed=2) > 0
    ids = torch.arange(8) // 2
    groups = [[0, 1, 2, 3], [], [], []] if ranks.count == 1 else [[0], [3, 1], [], [2]]
    if ranks.count == 2:
        groups = [[0, 1, 2], [3]]
    rows = torch.tensor([2 * g + i for g in groups[ranks.rank] for i in (0, 1)], dtype=torch.int64)
    mask[6:8] = False
    mine, own_ids = mask[rows], torch.arange(len(rows)) // 2
    options = {"all_reduce": ranks.all_reduce}
    close(advantage.whiten(x[rows], mine, **options), advantage.whiten(x, mask)[rows])
    close(
        advantage.grpo(x[rows], own_ids, mine, std_over="batch", **options),
        advantage.grpo(x, ids, mask, std_over="batch")[rows],
    )
    weights = corrections.importance_weights(x, y, mask)
    close(
        corrections.batch_normalized(corrections.importance_weights(x[rows], y[rows], mine), mine, **options).values,
        corrections.batch_normalized(weights, mask).values[rows],
    )
    close(
        filters.kl_cov(x[rows], y[rows], mine, fraction=0.3, **options), filters.kl_cov(x, y, mask, fraction=0.3)[rows]
    )
    close(filters.m2po(x[rows], y[rows], mine, tau=0.5, **options), filters.m2po(x, y, mask, tau=0.5)[rows])
    close(filters.high_entropy(x[rows], mine, **options), filters.high_entropy(x, mask)[rows])


def dtensors() -> None:
    """Logits and a head, cut by a mesh of four; and placements that are refused by name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, ids = random(4, 13), torch.arange(4) * 3
    want = gradients(lambda x: from_logits(x, ids).square().sum(), logits)

    def place(x: Tensor, *placements: Placement) -> DTensor:
        return distribute_tensor(x, mesh, list(placements))

    def of_columns(x: Tensor) -> Tensor:
        return from_logits(x.to_local(), ids, vocab=vocab_of(x)).square().sum()

    leaf = place(logits, Replicate(), Shard(1)).requires_grad_()
    value = of_columns(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    close(value.detach(), want[0])
    close(gradient.full_tensor(), want[1])
    rows = place(logits, Shard(0), Shard(1))  # rows and columns
    mine = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    close(from_logits(rows.to_local(), ids[mine], vocab=vocab_of(rows)), from_logits(logits, ids)[mine])

    head, hidden = random(13, 3), random(4, 3, seed=1)
    cut = place(head, Replicate(), Shard(0))
    close(from_hidden(hidden, cut.to_local(), ids, vocab=vocab_of(cut, dim=0)), from_hidden(hidden, head, ids))

    whole = place(logits, Replicate(), Replicate())
    ones = torch.ones(4, 4, dtype=torch.bool)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: from_logits(leaf, ids), "logits is a DTensor with placement Shard(dim=1)"),
        (lambda: from_hidden(hidden, cut, ids), "head_weight is a DTensor with placement Shard(dim=0)"),
        (lambda: from_hidden(place(hidden, Replicate(), Shard(1)), head, ids), "hidden is a DTensor"),
        (lambda: losses.full_kl(place(random(4, 4, 6), Shard(2), Replicate()), random(4, 4, 6), ones), "Shard(dim=2)"),
        (lambda: losses.gspo(place(random(4, 4), Shard(1), Replicate()), *random(2, 4, 4), ones), "Shard(dim=1)"),
        (lambda: losses.nll(DTensor.from_local(random(4, 4), mesh, [Partial(), Replicate()]), ones), "Partial"),
        (lambda: vocab_of(whole), "replicated logits need no vocab"),
        (lambda: vocab_of(place(logits, Shard(1), Shard(1))), "redistribute it"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def main() -> None:
    dist.init_process_group("gloo")
    for n in (1, 2, 4):
        ranks = Ranks(n)
        if ranks.rank < n:
            a_vocabulary(ranks)
            sequences(ranks)
            a_batch(ranks)
        dist.barrier()
    dtensors()
    if dist.get_rank() == 0:
        sys.stdout.write("1, 2 and 4 ranks give the numbers of one\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
