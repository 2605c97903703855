"""The presets: what their papers publish, and what they make the trainer compute."""

import pytest
import torch

from rlprims import advantage, algorithms, controllers, corrections, filters, losses
from rlprims.algorithms import PRESETS, LossTerm, policy_objective, use

MEASURED = {"values", "old_log_probs", "ref_log_probs", "baseline_scores", "entropies"}
"""Data that costs a forward pass, a model, or a generation."""
ENTROPY_BONUS = LossTerm(coefficient=0.01, loss=use(losses.negative_entropy))


def best_of_both(rewards, values, baseline_scores, response_mask, rollout_log_probs=None, *, share: float = 0.5):
    """A stranger's estimator that wants two baselines at once."""
    return torch.where(response_mask, rewards - share * values - (1 - share) * baseline_scores[:, None], 0.0)


@pytest.mark.parametrize(
    ("algorithm", "measured"),
    [
        (algorithms.reinforce(), set()),
        (algorithms.rloo(), set()),
        (algorithms.remax(), {"baseline_scores"}),
        (algorithms.spo(), {"old_log_probs"}),  # the baseline is remembered
        (algorithms.remax().replace(baseline=advantage.RoleBaseline), set()),
        (algorithms.ppo(), {"values", "old_log_probs"}),
        (algorithms.grpo(), {"old_log_probs", "ref_log_probs"}),
        (algorithms.grpo(kl_coef=0), {"old_log_probs"}),
        (algorithms.dr_grpo(), {"old_log_probs"}),
        (algorithms.dapo(), {"old_log_probs"}),
        (algorithms.rloo().replace(kl_in_reward={}), {"old_log_probs", "ref_log_probs"}),
        (algorithms.ppo().replace(kl_in_reward={}), {"values", "old_log_probs", "ref_log_probs"}),
        (algorithms.dapo().replace(loss_terms=[ENTROPY_BONUS]), {"old_log_probs", "entropies"}),
        (algorithms.reinforce().replace(advantage=best_of_both), {"values", "baseline_scores"}),
        (algorithms.vapo(), {"values", "old_log_probs"}),
        (algorithms.clip_cov(), {"old_log_probs"}),
        (algorithms.kl_cov(), {"old_log_probs"}),
        (algorithms.m2po(), {"old_log_probs"}),
        (algorithms.high_entropy(), {"old_log_probs", "entropies"}),
        (algorithms.fipo(), {"old_log_probs"}),
        (algorithms.turn_grpo(), {"old_log_probs"}),
        (algorithms.prime(), {"old_log_probs"}),
        (algorithms.reinforce().replace(corrections=[corrections.tis]), {"old_log_probs"}),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_only_what_a_signature_asks_for_is_measured(algorithm, measured):
    assert algorithm.needs & MEASURED == measured


def test_the_union_holds_every_name_without_a_default():
    needs = algorithms.dapo().needs
    assert {"rewards", "group_ids", "response_mask", "scores", "log_probs", "advantages", "losses"} <= needs
    assert not needs & {"cu_seqlens", "totals", "valid_rows", "bootstrap_values"}


def test_dapo_as_published():
    """arXiv:2503.14476: clip 0.2 and 0.28, 16 samples, 16384 + 4096 tokens of which 4096 are the soft margin, no KL."""
    dapo = algorithms.dapo()
    (overlong,) = dapo.score_shaping
    assert dapo.policy_loss.hyperparameters["clip_low"] == 0.2
    assert dapo.policy_loss.hyperparameters["clip_high"] == 0.28
    assert overlong.hyperparameters == {"max_length": 20480, "buffer_length": 4096, "penalty_factor": 1.0}
    assert dapo.group_size == 16
    assert dapo.filter.metric == "acc"
    assert dapo.aggregation.fn is losses.token_mean
    assert (dapo.loss_terms, dapo.kl_in_reward) == ((), None)


def test_grpo_as_published():
    """arXiv:2402.03300, section 4: 64 samples, KL coefficient 0.04 with the estimator of eq. 4, mean per response."""
    grpo = algorithms.grpo()
    (term,) = grpo.loss_terms
    assert grpo.group_size == 64
    assert (term.coefficient, term.loss.fn, term.loss.hyperparameters["value"]) == (0.04, losses.kl, "k3")
    assert grpo.aggregation.fn is losses.seq_mean_token_mean
    assert grpo.advantage.hyperparameters["normalize_std"]


def test_dr_grpo_removes_both_divisions():
    """arXiv:2503.20783: neither by the std nor by the response's own length."""
    dr_grpo = algorithms.dr_grpo(max_length=500)
    assert not dr_grpo.advantage.hyperparameters["normalize_std"]
    assert dr_grpo.aggregation == use(losses.seq_mean_token_sum_norm, length=500)


def test_ppo_as_published():
    """arXiv:1707.06347, table 3: epsilon 0.2, lambda 0.95. Whitened; the critic's clip is the policy's."""
    ppo = algorithms.ppo()
    assert ppo.advantage == use(advantage.gae, gamma=1.0, lam=0.95)
    assert ppo.policy_loss == use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.2)
    assert ppo.normalization.fn is advantage.whiten
    assert algorithms.ppo(lam=1.0).advantage.hyperparameters["lam"] == 1.0


def test_vapo_as_published():
    """arXiv:2504.05118: alpha 0.05, the critic's lambda 1, clip 0.2 and 0.28, 16 samples, imitation 0.1."""
    vapo = algorithms.vapo()
    assert vapo.advantage == use(advantage.length_adaptive_gae, alpha=0.05)
    assert vapo.value_target == use(advantage.td_lambda, lam=1.0)
    assert vapo.policy_loss == use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28)
    (imitated,) = vapo.loss_terms
    assert (imitated.coefficient, imitated.loss.fn, imitated.tokens.fn) == (0.1, losses.nll, algorithms.is_correct)
    assert algorithms.vapo(imitation=0).loss_terms == ()


def test_sao_as_its_implementations_quote_it():
    """arXiv:2607.07508: alpha 1.5, the critic's lambda 1, no group; ρ A log π within (0.7, 6) of the sampler."""
    sao = algorithms.sao()
    assert (sao.group_size, sao.updates_per_batch, sao.normalization) == (1, 1, None)
    assert sao.advantage == use(advantage.length_adaptive_gae, alpha=1.5)
    assert sao.value_target == use(advantage.td_lambda, lam=1.0)
    assert algorithms.check(sao) == []
    ratio = torch.tensor([[0.69, 0.71, 5.9, 6.1]], dtype=torch.float64)
    log_probs = torch.full((1, 4), -1.0, dtype=torch.float64, requires_grad=True)
    data = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "rollout_log_probs": log_probs.detach() - ratio.log(),
        "advantages": torch.tensor([[1.0, -2.0, 3.0, 4.0]], dtype=torch.float64),
        "response_mask": torch.ones(1, 4, dtype=torch.bool),
    }
    data |= algorithms.token_weights(sao, data)
    algorithms.policy_objective(sao, data).backward()
    # −ρ A / 4 where the ratio is kept: the tokens outside count in the mean
    assert log_probs.grad.flatten().tolist() == pytest.approx([0.0, 0.71 * 2 / 4, -5.9 * 3 / 4, 0.0])
    of_code = algorithms.sao(clip_low=0.8, clip_high=3.0).corrections[0].hyperparameters
    assert (of_code["low"], of_code["high"]) == (pytest.approx(0.2), 4.0)


def test_the_presets_that_choose_tokens_as_published():
    """arXiv:2505.22617, arXiv:2506.01939, arXiv:2510.01161."""
    clip_cov, kl_cov = algorithms.clip_cov(), algorithms.kl_cov()
    assert clip_cov.token_selection == use(filters.clip_cov, fraction=2e-4, low=1.0, high=5.0)
    (held,) = kl_cov.loss_terms
    assert (held.coefficient, held.loss.hyperparameters["value"]) == (1.0, "abs")
    assert held.tokens == use(filters.kl_cov, fraction=2e-3)
    assert kl_cov.updates_per_batch > 1
    assert algorithms.high_entropy().replace(name="dapo", token_selection=None) == algorithms.dapo()
    assert algorithms.high_entropy().token_selection == use(filters.high_entropy, fraction=0.2)
    assert algorithms.m2po().token_selection == use(filters.m2po, tau=0.04)


def test_credit_finer_than_a_response_asks_for_its_columns():
    """What the caller's environment, sampler or process reward model gives; fipo needs none of it."""
    columns = {"turn_ids", "turn_rewards", "tree_ids", "process_rewards"}
    assert algorithms.turn_grpo().needs & columns == {"turn_ids", "turn_rewards"}
    assert algorithms.tree_grpo().needs & columns == {"tree_ids"}
    assert algorithms.prime().needs & columns == {"process_rewards"}
    assert not algorithms.fipo().needs & columns


def test_fipo_is_dapo_with_influence_weights():
    """arXiv:2603.19835: DAPO, weights up to 1.2, half-life 32, and the dual clip of the script for 32B."""
    fipo = algorithms.fipo()
    assert algorithms.diff(algorithms.dapo(), fipo.replace(name="dapo", corrections=[])) == {
        "policy_loss.dual_clip": (None, 10.0),
        "mini_batches": (1, 4),
    }
    (weights,) = fipo.corrections
    assert weights.fn is corrections.fipo
    assert weights.hyperparameters["w_max"] == 1.2
    assert weights.hyperparameters["half_life"] == 32.0
    assert weights.hyperparameters["max_ratio"] == fipo.policy_loss.hyperparameters["dual_clip"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_named_as_its_function_and_has_no_lint_error(name):
    preset = PRESETS[name]()
    assert preset.name == name
    assert [f for f in algorithms.check(preset) if f.severity == "error"] == []


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "vapo"])
def test_a_preset_has_a_group_exactly_if_it_compares_within_one(name):
    """VAPO takes 16 samples of a prompt, and its critic is the baseline."""
    preset = PRESETS[name]()
    assert (preset.group_size > 1) == ("group_ids" in preset.advantage.needs)


def test_updates_per_batch_counts_optimizer_steps():
    assert algorithms.ppo().updates_per_batch == 1
    assert algorithms.ppo().replace(epochs=4, mini_batches=3).updates_per_batch == 12


def test_a_controller_is_a_stage_too():
    kl = {"controller": {"fn": "rlprims.controllers.AdaptiveKL", "target": 2}}
    ppo = algorithms.ppo().replace(kl_in_reward=kl)
    controller = ppo.kl_in_reward.controller({})
    assert isinstance(controller, controllers.AdaptiveKL)
    assert controller.target == 2.0
    assert dict(ppo.uses())["kl_in_reward"].fn is controllers.AdaptiveKL


def test_presets_need_entropies_before_an_update_or_in_a_loss():
    dapo = algorithms.dapo()
    assert dapo.token_weight_needs == frozenset()
    assert "entropies" in algorithms.high_entropy().token_weight_needs
    assert "entropies" not in algorithms.high_entropy().loss_needs
    assert "log_probs" in algorithms.clip_cov().token_weight_needs
    corrected = dapo.replace(corrections=[corrections.tis])
    assert corrected.token_weight_needs == {"old_log_probs", "rollout_log_probs", "response_mask"}
    assert corrected.loss_needs == dapo.loss_needs == {"log_probs", "old_log_probs", "advantages", "response_mask"}
    assert "entropies" in dapo.replace(loss_terms=[ENTROPY_BONUS]).loss_needs
    assert "scores" in algorithms.vapo().token_weight_needs


def test_a_selection_by_log_probs_asks_for_the_old_ones():
    """Before the first update of a batch they are the same."""
    chosen = algorithms.reinforce().replace(token_selection=filters.kl_cov)
    assert "old_log_probs" in chosen.needs
    assert "old_log_probs" not in algorithms.reinforce().replace(token_selection=filters.high_entropy).needs


def test_kl_to_sampler_is_prime_rls_squared_log_ratio():
    """τ log²ρ to the sampler, at τ = 1e-3, as a term of coefficient 2 τ: by hand, value and gradient."""
    x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rollout, mask = torch.tensor([[-1.5, -1.0]]), torch.tensor([[True, True]])
    term = LossTerm(coefficient=2e-3, loss=use(algorithms.kl_to_sampler))
    spec = algorithms.reinforce().replace(loss_terms=[term])
    assert "rollout_log_probs" in spec.needs
    assert spec.token_wise
    data = {"log_probs": x, "rollout_log_probs": rollout, "advantages": torch.zeros(1, 2), "response_mask": mask}
    loss = policy_objective(spec, data)
    assert float(loss.detach()) == pytest.approx(1e-3 * (0.25 + 1.0) / 2)
    loss.backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1e-3 * 0.5, -1e-3]]))


def test_kl_to_old_is_the_distance_to_the_old_policy():
    now, old, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert torch.equal(algorithms.kl_to_old(now, old, mask), torch.tensor([[0.5, 1.0]]))
    torch.testing.assert_close(algorithms.kl_to_old(now, old, mask, value="k2"), torch.tensor([[0.125, 0.5]]))
    leaf = now.clone().requires_grad_()
    algorithms.kl_to_old(leaf, old, mask, value="abs", gradient="k2").sum().backward()
    torch.testing.assert_close(leaf.grad, now - old)


def test_solved_tokens_are_those_of_the_positive_scores_padded_and_packed():
    scores, mask = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([[True, False], [True, True], [True, True]])
    assert algorithms.is_correct(scores, mask).tolist() == [[True, False], [False, False], [False, False]]
    assert algorithms.is_correct(scores, mask, threshold=-0.5).tolist() == [[True, False], [True, True], [False, False]]
    packed = algorithms.is_correct(scores, mask[mask], torch.tensor([0, 1, 3, 5]))
    assert packed.tolist() == [True, False, False, False, False]
