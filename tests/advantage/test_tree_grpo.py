"""Leaves compared with those of their tree and of their prompt."""

import pytest
import torch
from torch import Tensor

from rlprims.advantage import grpo, tree_grpo
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record(
        "advantage.tree_grpo",
        check_advantage,
        matters={"normalize_std": False, "ddof": 0, "eps": 0.1, "tolerance": 10.0},
    ),
    Record("advantage.tree_grpo", check_advantage, call={"normalize_std": False}),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
PLAIN = {"normalize_std": False}


def scores(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def one_token(rows: int) -> Tensor:
    return torch.ones(rows, 1, dtype=torch.bool)


def test_two_trees_by_hand() -> None:
    """Means 1.5 over the prompt; 3 and 0 over the trees."""
    got = tree_grpo(
        scores(4, 2, 0, 0), torch.zeros(4, dtype=torch.int64), torch.tensor([5, 5, -9, -9]), one_token(4), **PLAIN
    )
    assert got.flatten().tolist() == [2.5 + 1, 0.5 - 1, -1.5, -1.5]


def test_in_deviations() -> None:
    """Over the prompt (1, −1, 1, −1) · ½ / √(1/3); over each tree ±½ / √½."""
    got = tree_grpo(
        scores(1, 0, 1, 0), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1]), one_token(4), eps=0.0
    )
    x = 0.5 * 3**0.5 + 0.5**0.5
    torch.testing.assert_close(got, scores(x, -x, x, -x), **CLOSE)


def test_tree_grpo_compares_raw_scores_in_prompt_and_tree() -> None:
    """The authors' code compares z-scores in the tree: another number unless the prompt's deviation is 1."""
    ids, trees = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    s = scores(8, 4, 0, 0)
    prompt = grpo(s, ids, one_token(4), eps=1e-6)
    got = tree_grpo(s, ids, trees, one_token(4), eps=0.5)
    mine = grpo(s, ids, one_token(4), eps=0.5) + grpo(s, trees, one_token(4), eps=0.5)
    authors = grpo(s, ids, one_token(4), eps=0.5) + grpo(prompt, trees, one_token(4), eps=0.5)
    torch.testing.assert_close(got, mine, **CLOSE)
    assert (got - authors).abs().max() > 0.1


def test_a_tree_of_one_leaf_has_the_prompt_s_term_alone() -> None:
    s, ids = scores(1, 0, 3), torch.zeros(3, dtype=torch.int64)
    got = tree_grpo(s, ids, torch.arange(3), one_token(3))
    assert torch.equal(got, grpo(s, ids, one_token(3)))


def test_one_tree_is_twice_grpo() -> None:
    s, ids = scores(1, 0, 3), torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(tree_grpo(s, ids, ids, one_token(3)), 2 * grpo(s, ids, one_token(3)), **CLOSE)


def test_trees_of_two_prompts_may_have_one_number() -> None:
    s, ids = scores(1, 0, 5, 2), torch.tensor([0, 0, 1, 1])
    got = tree_grpo(s, ids, torch.zeros(4, dtype=torch.int64), one_token(4), **PLAIN)
    assert got.flatten().tolist() == [1, -1, 3, -3]


def test_trees_that_are_not_numbered_are_refused() -> None:
    with pytest.raises(ValueError, match="tree_ids has dtype"):
        tree_grpo(scores(1, 0), torch.zeros(2, dtype=torch.int64), torch.zeros(2), one_token(2))
