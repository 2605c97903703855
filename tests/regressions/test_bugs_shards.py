"""Tensor and context parallelism: gradients, sums and counts of which each rank has a part."""

import pytest
import torch
from torch import Tensor

from rlprims import advantage, layout, losses
from rlprims.logprobs import from_hidden, from_logits
from rlprims.testing import Rank, on_ranks
from rlprims.types import VocabShard

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_c1_a_shard_without_the_target_has_its_gradient() -> None:
    """ms-swift#9947: sums over ranks without autograd left −p out of the gradient of every shard."""
    logits, ids = random(3, 6), torch.tensor([0, 1, 0])  # all on the first of two shards
    whole = logits.clone().requires_grad_()
    (want,) = torch.autograd.grad(from_logits(whole, ids).sum(), whole)

    def ours(rank: Rank, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        vocab = VocabShard(3 * rank.index, 6, rank.all_reduce, rank.all_reduce_max)
        return torch.autograd.grad(from_logits(x, ids, vocab=vocab).sum(), x)[0]

    def peers(rank: Rank, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        total = rank.all_reduce(x.exp().sum(-1))
        own = x.gather(-1, ids[:, None])[:, 0] if rank.index == 0 else x.sum(-1) * 0
        return torch.autograd.grad((own - total.log()).sum(), x)[0]

    torch.testing.assert_close(torch.cat(on_ranks(ours, logits.split(3, 1)), 1), want, **EXACT)
    wrong = torch.cat(on_ranks(peers, logits.split(3, 1)), 1)
    assert (wrong[:, 3:] == 0).all()
    assert (want[:, 3:] < 0).all()


def test_c2_the_gradient_of_hidden_states_is_summed_once() -> None:
    """torchtitan#3822: it was summed over the ranks where it was whole already, and so doubled."""
    hidden, head, ids = random(4, 3), random(6, 3, seed=1), torch.tensor([0, 5, 2, 3])
    whole = hidden.clone().requires_grad_()
    (want,) = torch.autograd.grad(from_hidden(whole, head, ids).log_probs.sum(), whole)

    def gradient(rank: Rank, rows: Tensor, layer_sums: bool, we_sum: bool) -> Tensor:
        x = hidden.clone().requires_grad_()
        vocab = VocabShard(3 * rank.index, 6, rank.all_reduce, rank.all_reduce_max, sum_hidden_gradient=we_sum)
        (found,) = torch.autograd.grad(from_hidden(x, rows, ids, vocab=vocab).log_probs.sum(), x)
        return rank.all_reduce(found) if layer_sums else found

    for layer_sums in (False, True):
        for found in on_ranks(gradient, head.split(3), [layer_sums] * 2, [not layer_sums] * 2):
            torch.testing.assert_close(found, want, **EXACT)
    for found in on_ranks(gradient, head.split(3), [True] * 2, [True] * 2):
        torch.testing.assert_close(found, 2 * want, **EXACT)


def test_c3_a_batch_is_whitened_over_all_ranks_with_a_part() -> None:
    """slime#2235, miles#3229: over the data-parallel group only, so that parts of one sequence differ."""
    x, mask = random(2, 6), torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    want = advantage.whiten(x, mask)
    spans = [slice(0, 4), slice(4, 6)]
    got = on_ranks(lambda rank, s: advantage.whiten(x[:, s], mask[:, s], all_reduce=rank.all_reduce), spans)
    torch.testing.assert_close(torch.cat(got, 1), want, **EXACT)
    wrong = torch.cat([advantage.whiten(x[:, s], mask[:, s]) for s in spans], 1)
    assert (wrong - want).abs().max() > 0.1


def test_c4_a_rank_without_a_token_takes_part() -> None:
    """slime#2235, miles#3229: it left before the collective, and the others waited for ever."""
    x, mask = random(2, 6), torch.tensor([[True] * 4 + [False] * 2] * 2)
    spans = [slice(0, 4), slice(4, 6), slice(6, 6)]
    got = on_ranks(lambda rank, s: advantage.whiten(x[:, s], mask[:, s], all_reduce=rank.all_reduce), spans)
    torch.testing.assert_close(torch.cat(got, 1), advantage.whiten(x, mask), **EXACT)

    def peers(rank: Rank, s: slice) -> Tensor:
        return advantage.whiten(x[:, s], mask[:, s], all_reduce=rank.all_reduce) if mask[:, s].any() else x[:, s]

    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        on_ranks(peers, spans)


def test_c5_the_tokens_of_a_step_are_those_of_whole_sequences() -> None:
    """verl#5983, verl#6049: the count of one part, too few by the number of parts."""
    mask = torch.tensor([[True] * 8, [True] * 4 + [False] * 4])
    spans = [slice(0, 6), slice(6, 8)]
    whole = losses.count_totals(mask)
    for totals in on_ranks(lambda rank, s: losses.count_totals(mask[:, s], all_reduce_rows=rank.all_reduce), spans):
        assert totals == whole
    sequences = [int(losses.count_totals(mask[:, s]).sequences) for s in spans]
    assert sum(sequences) == 3  # the first is in both parts


def test_c6_a_cut_sequence_has_one_ratio() -> None:
    """Peers that give each part of a sequence to GSPO: another ratio for each, and another loss."""
    mask = torch.tensor([[True] * 8, [True] * 4 + [False] * 4])
    new, old, a = 0.05 * random(2, 8), 0.05 * random(2, 8, seed=1), torch.tensor([[1.0], [-1.0]]).expand(2, 8).double()
    spans = [slice(0, 6), slice(6, 8)]
    whole = losses.seq_mean_token_mean(losses.gspo(new, old, a, mask), mask)

    def ours(rank: Rank, s: slice) -> Tensor:
        per_token = losses.gspo(new[:, s], old[:, s], a[:, s], mask[:, s], all_reduce_rows=rank.all_reduce)
        totals = losses.count_totals(mask[:, s], all_reduce_rows=rank.all_reduce)
        row_tokens = layout.sequence_lengths(mask[:, s], all_reduce_rows=rank.all_reduce)
        return losses.seq_mean_token_mean(per_token, mask[:, s], None, totals, row_tokens)

    shares = on_ranks(ours, spans)
    torch.testing.assert_close(torch.stack(shares).sum(), whole, **EXACT)
    parts = [losses.gspo(new[:, s], old[:, s], a[:, s], mask[:, s]) for s in spans]
    wrong = sum(losses.seq_mean_token_mean(x, mask[:, s]) for x, s in zip(parts, spans, strict=True))
    assert abs(wrong - whole) > 0.4


def test_c7_the_shares_of_ranks_are_summed_and_multiplied_by_nothing() -> None:
    """SkyRL#1751: Megatron multiplies by the number of context-parallel ranks, and they did so again."""
    x, mask = random(2, 8), torch.ones(2, 8, dtype=torch.bool)
    totals = losses.count_totals(mask)
    shares = [losses.token_mean(x[:, s], mask[:, s], totals=totals) for s in (slice(0, 6), slice(6, 8))]
    averaged = sum(2 * share for share in shares) / 2  # what a wrapper that averages does to shares times two
    torch.testing.assert_close(averaged, losses.token_mean(x, mask), **EXACT)
    assert not torch.isclose(sum(4 * share for share in shares) / 2, losses.token_mean(x, mask))
