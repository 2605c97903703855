"""``use``: what is wrong with a stage is said when it is written down."""

import functools
import sys

import pytest
import torch

from rlprims import advantage, algorithms, controllers, filters, losses, rewards
from rlprims.algorithms import BoundFunction, import_path, use


def scaled_surprise(
    log_probs, response_mask, bonus=None, *, scale: float, rounds: int = 2, names: tuple[str, ...] = ()
):
    """A stranger's primitive: nothing in the library knows of it."""
    kept = torch.where(response_mask, log_probs, 0.0) * scale
    return -kept if bonus is None else bonus - kept


class TestNames:
    def test_a_misspelt_hyperparameter_is_refused_with_the_right_spelling(self):
        with pytest.raises(ValueError, match=r"no hyperparameter 'cliphigh': did you mean 'clip_high'\?"):
            use(losses.clipped_surrogate, cliphigh=0.28)

    def test_a_name_like_no_other_gets_the_list(self):
        with pytest.raises(ValueError, match=r"no hyperparameter 'q': it takes \['gamma', 'lam', 'shard'\]"):
            use(advantage.gae, q=1)

    def test_a_function_without_any_says_none(self):
        with pytest.raises(ValueError, match="it takes none"):
            use(losses.reinforce, clip_high=0.28)

    @pytest.mark.parametrize("data", ["advantages", "response_mask", "cu_seqlens"])
    def test_data_is_not_a_hyperparameter(self, data):
        with pytest.raises(ValueError, match=f"no hyperparameter '{data}'"):
            use(losses.clipped_surrogate, **{data: torch.zeros(1)})


class TestTypes:
    @pytest.mark.parametrize(
        ("fn", "wrong"),
        [
            (losses.clipped_surrogate, {"clip_high": "wide"}),
            (losses.clipped_surrogate, {"clip_high": None}),
            (losses.clipped_surrogate, {"clip_high": [0.2]}),
            (losses.kl, {"value": "k4"}),
            (advantage.grpo, {"ddof": 0.5}),
            (advantage.grpo, {"normalize_std": "perhaps"}),
            (controllers.AdaptiveKL, {"target": "low"}),
            (losses.clipped_surrogate, {"clip_high": True}),
            (losses.clipped_surrogate, {"dual_clip": True}),
            (advantage.grpo, {"ddof": False}),
        ],
    )
    def test_a_value_of_the_wrong_type_names_the_argument(self, fn, wrong):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* has the wrong type"):
            use(fn, **wrong)

    def test_yaml_reads_1e_3_as_text_and_it_becomes_the_number(self):
        assert use(losses.clipped_surrogate, clip_high="1e-3") == use(losses.clipped_surrogate, clip_high=0.001)

    def test_a_list_becomes_the_tuple_that_the_signature_names(self):
        part = use(scaled_surprise, scale=1.0, names=["a", "b"])
        assert part.hyperparameters["names"] == ("a", "b")
        assert isinstance(hash(part), int)

    def test_none_is_a_value_where_the_signature_allows_it(self):
        assert use(losses.clipped_surrogate, dual_clip=None).hyperparameters["dual_clip"] is None


class TestShortNames:
    @pytest.mark.parametrize("fn", [losses.token_mean, advantage.gae, controllers.AdaptiveKL, rewards.verifiers.gsm8k])
    def test_what_is_printed_is_read(self, fn):
        assert use(str(use(fn))) == use(fn)

    def test_a_short_name_keeps_the_settings_of_its_stage(self):
        mine = algorithms.dapo().replace(policy_loss={"fn": "losses.clipped_surrogate", "dual_clip": 3.0})
        assert mine.policy_loss == use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0)

    def test_ones_own_module_of_that_name_comes_first(self, tmp_path, monkeypatch):
        (tmp_path / "filters.py").write_text("def finite_scores(scores, group_ids):\n    return scores == scores\n")
        monkeypatch.syspath_prepend(tmp_path)
        try:
            assert import_path("filters.finite_scores").__module__ == "filters"
            assert import_path("filters.varied_scores") is filters.varied_scores
        finally:
            sys.modules.pop("filters", None)

    def test_a_broken_module_of_that_name_is_not_passed_over(self, tmp_path, monkeypatch):
        (tmp_path / "corrections.py").write_text("import no_such_package\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match=r"corrections\.tis' \(No module named 'no_such_package'\)"):
            import_path("corrections.tis")

    def test_a_printed_use_with_hyperparameters_is_a_mapping(self):
        with pytest.raises(ValueError, match=r"write \{fn: losses\.clipped_surrogate, name: value\}"):
            use("losses.clipped_surrogate(clip_high=0.28)")


class TestWhatMayFillAStage:
    @pytest.mark.parametrize("path", ["clipped_surrogate", "rlprims.losses.nothing", "no_such_package.f", ""])
    def test_a_path_that_leads_nowhere(self, path):
        with pytest.raises(ValueError, match=r"write it as package\.module\.function"):
            use(path)

    @pytest.mark.parametrize("thing", ["rlprims.losses", 3, None])
    def test_what_cannot_be_called(self, thing):
        with pytest.raises(ValueError, match="callable"):
            use(thing)

    def test_a_partial_has_its_hyperparameters_hidden(self):
        with pytest.raises(ValueError, match="expected a function or a class"):
            use(functools.partial(losses.kl, value="k1"))

    def test_a_path_and_the_function_are_the_same(self):
        assert use("rlprims.losses.kl", value="k2") == use(losses.kl, value="k2")
        assert import_path("rlprims.losses.kl") is losses.kl

    def test_the_path_is_the_public_one(self):
        assert use(losses.kl).path == "rlprims.losses.kl"

    def test_a_class_is_bound_by_the_signature_of_its_constructor(self):
        controller = use(controllers.AdaptiveKL, target="3")({})
        assert (controller.target, controller.value) == (3.0, 0.2)


class TestStrangersFunction:
    def test_needs_are_the_data_without_a_default(self):
        assert use(scaled_surprise, scale=1.0).needs == {"log_probs", "response_mask"}

    def test_unbound_is_what_has_no_value_yet(self):
        assert use(scaled_surprise).unbound == {"scale"}
        assert use(scaled_surprise, scale=1.0).unbound == set()

    def test_hyperparameters_show_defaults_and_bound_values(self):
        assert use(scaled_surprise, scale=3).hyperparameters == {"scale": 3.0, "rounds": 2, "names": ()}

    def test_it_is_stored_by_the_path_of_its_module(self):
        part = use(scaled_surprise, scale=0.5)
        assert part.model_dump(mode="json") == {"fn": f"{__name__}.scaled_surprise", "scale": 0.5}
        assert BoundFunction.model_validate_json(part.model_dump_json()) == part


class TestCall:
    mask = torch.tensor([[True, False]])
    x = torch.tensor([[-2.0, -9.0]])

    def test_it_takes_what_it_names_and_ignores_the_rest(self):
        data = {"log_probs": self.x, "response_mask": self.mask, "scores": None, "text": ["?"]}
        torch.testing.assert_close(use(scaled_surprise, scale=3)(data), torch.tensor([[6.0, 0.0]]))

    def test_optional_data_is_passed_when_it_is_there(self):
        data = {"log_probs": self.x, "response_mask": self.mask, "bonus": torch.ones(1, 2)}
        torch.testing.assert_close(use(scaled_surprise, scale=3)(data), torch.tensor([[7.0, 1.0]]))

    @pytest.mark.parametrize("data", [{"log_probs": x}, {"log_probs": x, "response_mask": None}])
    def test_missing_data_is_named_with_what_is_there(self, data):
        with pytest.raises(
            ValueError, match=r"scaled_surprise: expected \['response_mask'\] in the batch, which has \['log_probs'"
        ):
            use(scaled_surprise, scale=1)(data)


def test_a_bound_function_is_written_as_a_call():
    assert str(use(losses.clipped_surrogate, clip_low=0.1)) == "losses.clipped_surrogate(clip_low=0.1)"
    assert str(use(losses.reinforce)) == "losses.reinforce"


def test_a_default_that_is_spelt_out_is_the_same_value():
    spelt, plain = use(losses.kl, value="k3"), use(losses.kl)
    assert spelt == plain
    assert hash(spelt) == hash(plain)
    assert spelt != use(losses.kl, value="k2")
    assert plain != use(losses.reinforce)
    assert plain != "rlprims.losses.kl"


def test_a_switch_stays_one():
    assert use(advantage.grpo, normalize_std=False).hyperparameters["normalize_std"] is False


def test_bound_values_are_the_same_in_any_order_and_frozen():
    one = use(losses.clipped_surrogate, clip_low=0.1, clip_high=0.2)
    two = use(losses.clipped_surrogate, clip_high=0.2, clip_low=0.1)
    assert one == two
    assert hash(one) == hash(two)
    with pytest.raises(ValueError, match="frozen"):
        one.fn = losses.kl
