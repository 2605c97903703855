"""``examples/simulate.py``: by hand, and beside autograd."""

import doctest
import math

import pytest
import torch

import examples.simulate
from examples import tabular
from examples.simulate import compare, simulate
from rlprims import advantage, algorithms, corrections, filters, losses
from rlprims.algorithms import LossTerm, estimate_advantages, policy_objective, shape_scores, use
from rlprims.data_proto import DataProto

REINFORCE = algorithms.reinforce()


def test_its_examples() -> None:
    assert doctest.testmod(examples.simulate) == (0, 7)


def test_a_preset_must_be_called() -> None:
    with pytest.raises(ValueError, match=r"expected an Algorithm, got 'dapo': write algorithms\.grpo\(\)"):
        simulate("dapo", {})


def two_by_two() -> dict[str, torch.Tensor]:
    """A right answer of two tokens, on the second of which the policy has moved, and a wrong one of one."""
    return {
        "response_mask": torch.tensor([[True, True], [True, False]]),
        "old_log_probs": torch.full((2, 2), -1.0, dtype=torch.float64),
        "log_probs": torch.tensor([[-1.0, -1.0 + math.log(1.5)], [-1.0, 99.0]], dtype=torch.float64),
        "scores": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "group_ids": torch.tensor([7, 7]),
    }


def batch() -> dict[str, torch.Tensor]:
    """Sampled answers of a tiny task, with a policy that has moved."""
    task = tabular.stop_after()
    generator = torch.Generator().manual_seed(0)
    sampled = task.sample(task.uniform(), 8, generator)
    moved = 0.3 * torch.randn(sampled["old_log_probs"].shape, generator=generator, dtype=torch.float64)
    extra = {"values": torch.zeros_like(moved), "correct": sampled["scores"], "format": 1 - sampled["scores"] / 2}
    extra |= {"teacher_log_probs": moved.flip(0), "teacher_mask": sampled["response_mask"].any(-1)}
    extra |= {"turn_rewards": moved.abs(), "process_rewards": moved, "tree_ids": sampled["responses"][:, 1]}
    return {**sampled, **extra, "log_probs": sampled["old_log_probs"] + moved}


def test_two_by_two_by_hand():
    dr_grpo = algorithms.dr_grpo(max_length=10)
    table = simulate(dr_grpo, two_by_two())
    assert table["row"] == [0, 0, 1]
    assert table["position"] == [0, 1, 0]
    assert table["ratio"] == pytest.approx([1.0, 1.5, 1.0])
    assert table["advantage"] == [0.5, 0.5, -0.5]
    assert table["weight"] == [1.0, 1.0, 1.0]
    assert table["clip"] == ["", "high", ""]
    assert table["cause"] == ["", "clipped", ""]
    assert table["coefficient"] == pytest.approx([1.0, 0.0, 1.0])
    # The mean over two answers of sums divided by 10; the clipped token stands at −1.2 · 0.5.
    assert table["loss_share"] == pytest.approx([-0.025, -0.03, 0.025])
    assert table["gradient"] == pytest.approx([0.025, 0.0, -0.025])
    assert table.notes["objective"] == pytest.approx(-0.03)


SEVERAL_TOKENS = {name for name, preset in algorithms.PRESETS.items() if "topk_log_probs" in preset().loss_needs}
"""Presets whose gradient is to more than the sampled token."""


@pytest.mark.parametrize("name", sorted(set(algorithms.PRESETS) - SEVERAL_TOKENS))
def test_gradients_are_autograd_s_and_shares_add_up_to_the_objective(name):
    algorithm = algorithms.PRESETS[name]().replace(filter=None)
    data = batch()
    table = simulate(algorithm, data)
    log_probs = data["log_probs"].clone().requires_grad_()
    data |= algorithms.component_scores(algorithm, data)
    data |= shape_scores(algorithm, data)
    kl_coef = algorithm.kl_in_reward.controller({}).value if algorithm.kl_in_reward else 0.0
    data |= estimate_advantages(algorithm, data, kl_coef=kl_coef)
    data |= algorithms.token_weights(algorithm, data, generator=torch.Generator().manual_seed(0))
    objective = policy_objective(algorithm, {**data, "log_probs": log_probs})
    (slope,) = torch.autograd.grad(objective, log_probs)
    assert table.notes["objective"] == float(objective.detach())
    assert sum(table["loss_share"]) == pytest.approx(float(objective.detach()), abs=1e-9)
    assert table["gradient"] == (-slope[data["response_mask"]]).tolist()


def test_reinforce_has_coefficient_one_wherever_there_is_an_advantage():
    table = simulate(REINFORCE, batch())
    assert set(table["coefficient"]) == {0.0, 1.0}
    assert [c == 0 for c in table["coefficient"]] == [a == 0 for a in table["advantage"]]
    assert {cause for cause, a in zip(table["cause"], table["advantage"], strict=True) if a == 0} == {"no advantage"}


def test_tokens_between_those_of_a_response_are_masked_and_padding_is_left_out():
    data = {
        "response_mask": torch.tensor([[False, True, False, True, False]]),
        "advantages": torch.tensor([[torch.nan, 1.0, torch.nan, 1.0, torch.nan]]),
    }
    table = simulate(REINFORCE, data)
    assert table["position"] == [1, 2, 3]
    assert table["cause"] == ["", "masked", ""]
    assert table["gradient"] == [0.5, 0.0, 0.5]
    assert table["ratio"] == [1.0, 1.0, 1.0]


def test_a_dropped_group_says_why_and_the_others_are_as_without_it():
    data = two_by_two()
    tripled = {name: torch.cat([x, x, x]) for name, x in data.items()}
    tripled["scores"] = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    tripled["group_ids"] = torch.tensor([3, 3, 5, 5, 9, 9])
    dapo = algorithms.dapo(metric="scores")
    table = simulate(dapo, tripled)
    causes = ["dropped: scores is 0 throughout"] * 3 + ["dropped: scores is 1 throughout"] * 3
    assert table["cause"][:6] == causes
    assert table["gradient"][:6] == [0.0] * 6
    alone = simulate(dapo, data)
    for name in ("advantage", "clip", "coefficient", "loss_share", "gradient"):
        assert table[name][6:] == alone[name]


def test_a_batch_in_which_every_group_is_dropped():
    data = {**two_by_two(), "scores": torch.zeros(2)}
    table = simulate(algorithms.dapo(metric="scores"), data)
    assert table.notes["objective"] == 0.0
    assert table["gradient"] == [0.0] * 3


def test_a_correction_and_a_selection_are_named_where_they_weigh_a_token_nothing():
    sampled = {**two_by_two(), "entropies": torch.tensor([[2.0, 0.1], [1.0, 0.0]])}
    sampled["rollout_log_probs"] = torch.tensor([[-1.0, -1.0], [-9.0, 0.0]], dtype=torch.float64)
    corrected = algorithms.rloo().replace(corrections=(use(corrections.icepop),))
    table = simulate(corrected, sampled)
    assert table["cause"] == ["", "", "corrections.icepop"]
    assert table["weight"] == [1.0, 1.0, 0.0]
    selected = algorithms.rloo().replace(token_selection=use(filters.high_entropy, fraction=0.5))
    causes = simulate(selected, sampled)["cause"]
    assert causes.count("filters.high_entropy(fraction=0.5)") == 1
    assert causes[1] == "filters.high_entropy(fraction=0.5)"


@pytest.mark.parametrize(
    ("loss", "advantage_", "ratio", "side"),
    [
        (use(losses.clipped_surrogate), 1.0, 1.5, "high"),
        (use(losses.clipped_surrogate), 1.0, 0.5, ""),
        (use(losses.clipped_surrogate), -1.0, 0.5, "low"),
        (use(losses.clipped_surrogate), -1.0, 1.5, ""),
        (use(losses.clipped_surrogate, dual_clip=3.0), -1.0, 4.0, "high"),
        (use(losses.clipped_surrogate, clip_low=0.0), -1.0, 0.9, "low"),
        (use(losses.gspo), 1.0, 1.1, "high"),
        (use(losses.gspo), -1.0, 0.9, "low"),
        (use(losses.cispo), 1.0, 9.0, ""),
    ],
)
def test_the_side_of_a_clip(loss, advantage_, ratio, side):
    data = {
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
        "old_log_probs": torch.full((1, 1), -3.0),
        "log_probs": torch.full((1, 1), -3.0 + math.log(ratio)),
        "advantages": torch.full((1, 1), advantage_),
        "group_ids": torch.tensor([0]),
    }
    assert simulate(REINFORCE.replace(policy_loss=loss), data)["clip"] == [side]


def test_the_side_of_a_whole_response_s_clip_is_not_the_token_s():
    data = two_by_two() | {"advantages": torch.tensor([[1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)}
    del data["scores"]
    data["log_probs"][0] += torch.tensor([-0.1, 0.0])
    assert simulate(REINFORCE.replace(policy_loss=losses.gspo), data)["clip"][:2] == ["high", "high"]


def test_a_loss_term_pulls_also_where_the_policy_loss_is_flat():
    data = two_by_two() | {"ref_log_probs": torch.full((2, 2), -1.0, dtype=torch.float64)}
    with_kl = algorithms.dr_grpo(max_length=10).replace(loss_terms=(LossTerm(coefficient=1.0, loss=use(losses.kl)),))
    table = simulate(with_kl, data)
    assert table["cause"][1] == "clipped"
    assert table["gradient"][1] < 0  # back to the reference


def test_a_data_proto_gives_the_same_and_its_tokens():
    data = two_by_two()
    texts = {"response_tokens": [["a", "b"], ["c"]]}
    mine, theirs = simulate(REINFORCE, data), simulate(REINFORCE, DataProto.from_dict(data, texts))
    assert theirs["token"] == ["a", "b", "c"]
    assert theirs["gradient"] == mine["gradient"]


def test_the_batch_is_left_as_it_was():
    data = two_by_two()
    before = {name: x.clone() for name, x in data.items()}
    simulate(algorithms.dapo(metric="scores"), data)
    assert data.keys() == before.keys()
    assert all(torch.equal(data[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("response_mask", "no response_mask"), ("scores", "neither scores nor advantages"), ("group_ids", "no group_ids")],
)
def test_simulate_names_missing_data(missing, message):
    data = {name: x for name, x in two_by_two().items() if name != missing}
    with pytest.raises(ValueError, match=message):
        simulate(REINFORCE, data)


def test_packed_batches_are_refused():
    with pytest.raises(ValueError, match=r"layout\.unpack"):
        simulate(REINFORCE, {"response_mask": torch.ones(3, dtype=torch.bool)})


def test_equal_algorithms_change_nothing():
    comparison = compare([algorithms.gspo(), algorithms.gspo()], batch())
    assert len(comparison.settings) == 0
    assert set(comparison.tokens["change gspo #2"]) == {0.0}
    assert comparison.responses["share gspo"] == comparison.responses["share gspo #2"]


def test_compare_shows_what_a_swap_changes():
    mine = algorithms.dr_grpo(max_length=10)
    unclipped = mine.replace(name="unclipped", policy_loss={"clip_high": 9.0})
    comparison = compare([mine, unclipped], two_by_two())
    assert list(comparison.settings.rows()) == [
        {"setting": "policy_loss.clip_high", "algorithm": "unclipped", "value": "9.0", "dr_grpo": "0.2"}
    ]
    assert comparison.tokens["change unclipped"] == pytest.approx([0.0, 0.0375, 0.0])
    assert comparison.responses["push dr_grpo"] == pytest.approx([0.025, -0.025])
    assert comparison.responses["push unclipped"] == pytest.approx([0.0625, -0.025])
    assert comparison.responses["share unclipped"] == pytest.approx([5 / 7, 2 / 7])
    assert "policy_loss.clip_high" in repr(comparison)
    assert "policy_loss.clip_high" in comparison._repr_html_()


def test_one_algorithm_is_no_comparison():
    with pytest.raises(ValueError, match="at least two"):
        compare([REINFORCE], two_by_two())


def test_an_estimator_of_one_s_own_takes_part():
    swapped = REINFORCE.replace(advantage=advantage.rloo)
    assert simulate(swapped, two_by_two())["advantage"] == [1.0, 1.0, -1.0]


def test_simulate_gives_tool_output_a_share_and_a_gradient():
    data = {
        "log_probs": torch.tensor([[-1.0, -2.0, -3.0]]),
        "advantages": torch.tensor([[1.0, 0.0, 1.0]]),
        "response_mask": torch.tensor([[True, False, True]]),
        "observation_mask": torch.tensor([[False, True, False]]),
    }
    table = simulate(algorithms.echo(), data)
    assert table["loss_share"] == pytest.approx([-0.5, 0.2, -0.5])
    assert table["gradient"] == pytest.approx([0.5, 0.1, 0.5])
    assert table.notes["objective"] == pytest.approx(-0.8)
