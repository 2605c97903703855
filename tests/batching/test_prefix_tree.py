"""Rows that begin alike as a tree: every distinct beginning once, and each row's own numbers back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlprims.batching import PrefixTree, prefix_tree
from tests.execution.execution_families import build, gradients, norms_in_float64

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=7)


def of(rows: list[list[int]], *, width: int = 7, left: int = 0) -> tuple[PrefixTree, Tensor, Tensor]:
    """The tree of rows with ``left`` tokens of padding before them, and 77 as padding."""
    padded = [[77] * left + row + [77] * (width - left - len(row)) for row in rows]
    ids = torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)
    place = torch.arange(width) - left
    mask = (place >= 0) & (place < torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None])
    return prefix_tree(ids, mask), ids, mask


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 1))
def test_every_beginning_is_there_once(rows: list[list[int]], left: int) -> None:
    tree, ids, mask = of(rows, left=left)
    beginnings = sorted({tuple(row[: n + 1]) for row in rows for n in range(len(row))})
    found = []
    for node, parent in enumerate(tree.parents.tolist()):
        assert parent < node
        found.append((*(() if parent < 0 else found[parent]), int(tree.token_ids[node])))
    assert found == beginnings  # depth first is the order of the dictionary
    assert tree.position_ids.tolist() == [len(beginning) - 1 for beginning in found]
    assert torch.equal(tree.per_row(tree.token_ids), torch.where(mask, ids, 0))
    for row, nodes in zip(rows, tree.nodes, strict=True):
        assert [found[n] for n in nodes.tolist() if n >= 0] == [tuple(row[: n + 1]) for n in range(len(row))]
    sees = [[q[: len(k)] == k for k in found] for q in found]
    assert tree.visible().tolist() == sees


@settings(max_examples=25, deadline=None)
@given(ROWS, st.randoms())
def test_rows_in_another_order_have_the_same_tree(rows: list[list[int]], random) -> None:
    order = random.sample(range(len(rows)), len(rows))
    one, other = of(rows)[0], of([rows[i] for i in order])[0]
    assert torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.ends, other.ends)
    assert torch.equal(one.nodes[order], other.nodes)


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([[1, 2], [2, 2]], [1, 2, 2, 2]),  # nothing shared
        ([[1, 2], [1, 2], [1, 2]], [1, 2]),
        ([[1, 2, 3], [1, 2], [1]], [1, 2, 3]),  # each begins another
        ([[], [1]], [1]),
        ([], []),
    ],
)
def test_the_ends(rows: list[list[int]], tokens: list[int]) -> None:
    assert of(rows)[0].token_ids.tolist() == tokens


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_computes_each_token_once(kind: str) -> None:
    """Log-probs and gradients of the padded batch to 1e-10, by transformers' own attention under the tree's mask."""
    model = build(kind)
    norms_in_float64(model)
    rows = [[1, 2, 3, 4, 9, 5], [1, 2, 3, 7], [1, 2, 3, 7, 8, 9], [4, 2]]
    tree, ids, mask = of(rows)
    targets = torch.where(mask, ids, 0).roll(-1, 1)
    predicted = mask & mask.roll(-1, 1) & (torch.arange(7) < 6)
    slope = torch.arange(28).reshape(4, 7)

    def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        return log_probs[predicted].detach(), (log_probs * slope)[predicted].sum()

    padded, sum_padded = loss(model(torch.where(mask, ids, 0), attention_mask=mask.long()).logits)
    once = model(tree.token_ids[None], position_ids=tree.position_ids[None], attention_mask=tree.visible()[None, None])
    assert once.logits.shape[1] == 11 < 18
    shared, sum_shared = loss(tree.per_row(once.logits[0]))
    torch.testing.assert_close(shared, padded, rtol=0, atol=1e-10)
    wanted = gradients(sum_padded, model)
    for name, gradient in gradients(sum_shared, model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("ids", "mask", "match"),
    [
        (torch.zeros(3).long(), torch.ones(3).bool(), r"token_ids has shape \(3,\)"),
        (torch.zeros(1, 3), torch.ones(1, 3).bool(), "dtype torch.float32, expected int"),
        (torch.zeros(1, 3).long(), torch.ones(1, 3), r"use attention_mask.bool\(\)"),
        (torch.zeros(1, 3).long(), torch.ones(1, 2).bool(), r"expected bool \(1, 3\)"),
    ],
)
def test_errors(ids: Tensor, mask: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        prefix_tree(ids, mask)
