"""``replace``, ``merge``, ``diff``: an algorithm is changed by a few words, and what changed can be read."""

import pytest

from rlprims import advantage, algorithms, filters, losses
from rlprims.algorithms import Algorithm, diff, merge, parse, settings, use


class TestReplace:
    def test_a_mapping_changes_one_setting_and_keeps_the_others(self):
        dapo = algorithms.dapo()
        assert dapo.replace(policy_loss={"clip_high": 0.3}).policy_loss == use(
            losses.clipped_surrogate, clip_low=0.2, clip_high=0.3
        )

    def test_a_mapping_reaches_down(self):
        changed = algorithms.dapo().replace(filter={"keep": {"tolerance": 0.1}})
        assert changed.filter.keep == use(filters.varied_scores, tolerance=0.1)
        assert changed.filter.metric == "acc"

    def test_another_function_begins_from_its_own_defaults(self):
        changed = algorithms.dr_grpo().replace(
            aggregation={"fn": "rlprims.losses.token_mean"}, advantage=advantage.grpo
        )
        assert changed.aggregation == use(losses.token_mean)
        assert changed.advantage.hyperparameters["normalize_std"]

    def test_a_stage_is_a_function_a_path_a_use_or_a_mapping(self):
        ways = [
            losses.reinforce,
            "rlprims.losses.reinforce",
            use(losses.reinforce),
            {"fn": "rlprims.losses.reinforce"},
            {"fn": losses.reinforce},
        ]
        assert len({algorithms.ppo().replace(policy_loss=way) for way in ways}) == 1

    def test_none_empties_a_stage(self):
        assert algorithms.dapo().replace(filter=None).filter is None

    def test_an_empty_stage_is_filled(self):
        assert algorithms.grpo().replace(filter={"metric": "scores"}).filter.metric == "scores"

    def test_the_original_is_as_it_was(self):
        ppo = algorithms.ppo()
        ppo.replace(policy_loss={"clip_high": 0.9}, epochs=7)
        assert ppo == algorithms.ppo()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"agregation": losses.token_sum}, "agregation: "),
            ({"policy_loss": {"cliphigh": 1}}, "policy_loss: .*did you mean 'clip_high'"),
            ({"policy_loss": {"clip_high": "x"}}, "policy_loss: .*clip_high='x' has the wrong type"),
            ({"policy_loss": "rlprims.losses.nothing"}, "policy_loss: cannot import 'rlprims.losses.nothing'"),
            ({"group_size": True}, "group_size: expected a number, a text or a function, got True"),
            (
                {"loss_terms": [{"coefficient": True, "loss": losses.kl}]},
                r"loss_terms\.0\.coefficient: expected a number, a text or a function, got True",
            ),
            ({"group_size": 0}, "group_size: .*greater than or equal to 1"),
            ({"epochs": 1.5}, "epochs: "),
            ({"filter": {"at_limit": "shrug"}}, "filter.at_limit: "),
            ({"kl_in_reward": {"estimator": "k4"}}, "kl_in_reward.estimator: "),
            ({"score_shaping": [{"max_length": 4}]}, r"score_shaping\.0: expected 'fn'"),
            ({"loss_terms": [{"loss": losses.kl}]}, r"loss_terms\.0\.coefficient: "),
        ],
    )
    def test_a_mistake_is_named_with_its_place(self, changes, message):
        with pytest.raises(ValueError, match=message):
            algorithms.ppo().replace(**changes)

    def test_every_mistake_is_named_at_once(self):
        with pytest.raises(ValueError, match=r"(?s)group_size.*\n.*epochs"):
            algorithms.ppo().replace(group_size=0, epochs=0)


class TestUnbound:
    def test_a_hyperparameter_without_a_value_stops_the_build(self):
        with pytest.raises(ValueError, match=r"aggregation: .*seq_mean_token_sum_norm has no value for \['length'\]"):
            algorithms.grpo().replace(aggregation=losses.seq_mean_token_sum_norm)

    def test_in_a_list_the_place_is_numbered(self):
        with pytest.raises(ValueError, match=r"score_shaping\.0: .*\['buffer_length', 'max_length'\]"):
            algorithms.grpo().replace(score_shaping=["rlprims.rewards.overlong_penalty"])

    def test_the_constructor_refuses_it_too(self):
        with pytest.raises(ValueError, match="has no value for"):
            Algorithm(name="a", advantage=use(advantage.rloo), aggregation=use(losses.seq_mean_token_sum_norm))


class TestMerge:
    def test_key_by_key(self):
        assert merge({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 4}, "e": 5}) == {
            "a": 1,
            "b": {"c": 2, "d": 4},
            "e": 5,
        }

    def test_a_path_is_short_for_a_mapping(self):
        assert merge("m.f", {"k": 1}) == {"fn": "m.f", "k": 1}

    def test_another_fn_begins_with_its_own_hyperparameters(self):
        assert merge({"fn": "m.f", "k": 1}, {"fn": "m.g"}) == {"fn": "m.g"}
        assert merge({"fn": "m.f", "k": 1}, "m.g") == "m.g"

    def test_lists_are_replaced_and_nothing_is_written_into_the_base(self):
        base = {"a": [1, 2], "b": {"c": 1}}
        assert merge(base, {"a": [3], "b": {"c": 2}}) == {"a": [3], "b": {"c": 2}}
        assert base == {"a": [1, 2], "b": {"c": 1}}


class TestDiff:
    def test_only_what_differs_with_both_values(self):
        dapo = algorithms.dapo()
        assert diff(dapo, dapo.replace(policy_loss={"clip_high": 0.3}, group_size=8)) == {
            "group_size": (16, 8),
            "policy_loss.clip_high": (0.28, 0.3),
        }

    def test_an_algorithm_does_not_differ_from_itself_or_its_copy(self):
        assert diff(algorithms.dapo(), parse(algorithms.dapo().model_dump(mode="json"))) == {}

    def test_a_default_that_is_spelt_out_is_no_difference(self):
        grpo = algorithms.grpo()
        assert diff(grpo, grpo.replace(advantage={"ddof": 1})) == {}
        assert grpo == grpo.replace(advantage={"ddof": 1})

    def test_a_setting_that_one_lacks_is_none_there(self):
        found = diff(algorithms.ppo(), algorithms.ppo().replace(policy_loss=losses.reinforce))
        assert found["policy_loss.clip_high"] == (0.2, None)
        assert found["policy_loss.fn"] == ("rlprims.losses.clipped_surrogate", "rlprims.losses.reinforce")

    def test_the_other_way_round_is_mirrored(self):
        there, back = diff(algorithms.ppo(), algorithms.dapo()), diff(algorithms.dapo(), algorithms.ppo())
        assert there == {name: (b, a) for name, (a, b) in back.items()}

    def test_settings_are_flat_and_hold_the_defaults(self):
        flat = settings(algorithms.dapo())
        assert flat["filter.keep.tolerance"] == 1e-6
        assert flat["score_shaping.0.max_length"] == 20480
        assert flat["kl_in_reward"] is None
        assert all(not isinstance(value, dict | tuple) for value in flat.values())
