"""A preset in a library's dialect gives what that library computed: advantages, loss and gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import algorithms, corrections, losses
from rlprims.algorithms import DIALECTS, PRESETS, Algorithm, use
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.types import Totals
from tests.golden_calls.common import NAMES, leaf, policy_of, slope
from tests.golden_calls.losses import around_one, clip_of
from tests.golden_cases import Case, cases
from tests.test_golden import difference

CASES = list(cases())
Data = dict[str, Any]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """Cases of a library's function: which of them speak of an entry, what they give, the settings that they vary."""

    primitive: str
    data: Callable[[Case], Data]
    settings: Callable[[Case], Settings] = lambda c: {}
    chosen: Callable[[Case], bool] = lambda c: True
    names: tuple[str, ...] = ("advantages",)


# Advantages. The rewards are the library's own, token by token: a "KL" of −reward, at the coefficient 1.


def paid(rewards: Tensor) -> Data:
    zero = torch.zeros_like(rewards)
    return {"shaped_scores": zero[:, 0], "old_log_probs": -rewards, "ref_log_probs": zero}


def verl_rows(c: Case) -> Data:
    names = {"reward_baselines": "baseline_scores", "values": "values"}
    data = {ours: c.inputs[theirs] for theirs, ours in names.items() if theirs in c.inputs}
    mask = c.inputs["response_mask"].bool()
    if "index" in c.inputs:
        data["group_ids"] = dense_ids(c.inputs["index"])
    if "keys" in c.args:
        data["component_scores"] = torch.stack([c.inputs[name] for name in c.args["keys"]], 1)
    rewards = c.inputs.get("token_level_rewards", torch.zeros(mask.shape))
    return {**paid(rewards), **data, "response_mask": mask}


def gae_rows(c: Case) -> Data:
    mask = c.inputs["action_mask"].bool()
    return {**paid(c.inputs["rewards"]), "values": c.inputs["values"], "response_mask": mask}


def scored(scores: Tensor, ids: Tensor, mask: Tensor, **more: Any) -> Data:
    return {"shaped_scores": scores, "group_ids": ids, "response_mask": mask, **more}


def in_groups(scores: Tensor, size: int, width: int = 1) -> Data:
    return scored(scores, torch.arange(len(scores)) // size, torch.ones(len(scores), width, dtype=torch.bool))


def trl_rows(c: Case) -> Data:
    components, size = c.inputs["rewards_per_func"], c.args["num_generations"]
    scores = components @ torch.tensor(c.args["reward_weights"])
    known = scores.isfinite()
    data = in_groups(torch.where(known, scores, 0.0), size)
    return {**data, "valid_rows": known, "component_scores": torch.where(known[:, None], components, 0.0)}


def nemo_rows(c: Case) -> Data:
    ids = dense_ids([tuple(p) for p in c.inputs["prompt_ids"].tolist()]) if "prompt_ids" in c.inputs else None
    return scored(c.inputs["rewards"], ids, c.inputs["mask"].bool(), values=c.inputs.get("values"))


def of_group(**changes: Any) -> Callable[[Case], Settings]:
    return lambda c: {"advantage": changes}


def verl_eps(c: Case) -> Settings:
    return {"advantage": {"eps": c.args["epsilon"]}}


def verl_divides(c: Case) -> bool:
    return bool(c.args["norm_adv_by_std_in_grpo"])


VERL_GRPO = Recorded("advantage.grpo", verl_rows, verl_eps, verl_divides)


def trl_advantage(scale: str = "group", how: str = "sum_then_normalize") -> Recorded:
    def chosen(c: Case) -> bool:
        return (c.args["scale_rewards"], c.args["multi_objective_aggregation"]) == (scale, how)

    def settings(c: Case) -> Settings:
        return {"advantage": {"weights": c.args["reward_weights"]}} if how == "normalize_then_sum" else {}

    def data(c: Case) -> Data:
        rows = trl_rows(c)
        return rows if how == "normalize_then_sum" else {**rows, "component_scores": None}

    return Recorded("trl_grpo_advantage", data, settings, chosen)


def openrlhf_advantage(estimator: str) -> Recorded:
    def data(c: Case) -> Data:
        return in_groups(c.inputs["rewards"], c.args["n_samples_per_prompt"], c.args["tokens_per_row"])

    return Recorded(f"openrlhf_group.{estimator}", data)


NEMO_GRPO = Recorded(
    "nemo_grpo_advantage",
    nemo_rows,
    chosen=lambda c: c.args["normalize_rewards"] and not c.args["use_leave_one_out_baseline"],
)
AREAL_GRPO = Recorded(
    "areal_normalization",
    lambda c: in_groups(c.inputs["x"], c.args["group_size"]),
    chosen=lambda c: c.args["mean_level"] == c.args["std_level"] == "group" and not c.args["mean_leave1out"],
    names=("out",),
)

# Losses. Of verl the cases without weights of its rollout correction.


def tensors(c: Case) -> Data:
    p = policy_of(c)
    sampler = "old_logprobs" if c.peer == "areal" else "rollout_logprobs"
    return {
        "log_probs": p.log_probs,
        "old_log_probs": p.old_log_probs,
        "rollout_log_probs": c.inputs.get(sampler),
        "advantages": p.advantages,
        "response_mask": p.mask,
        "totals": totals_of(c, p.mask),
    }


def totals_of(c: Case, mask: Tensor) -> Totals:
    """Counts that the library was told; TRL, and verl's GMPO, count rows without tokens too."""
    all_rows = c.peer == "trl" or c.primitive == "policy_loss.geo_mean"
    rows = len(mask) if all_rows else int((sequence_lengths(mask) > 0).sum())
    sequences = rows if c.primitive == "policy_loss.geo_mean" else c.args.get("global_batch_size", rows)
    return Totals(tokens=c.args.get("batch_num_tokens", int(mask.sum())), sequences=sequences, groups=0)


def clips(c: Case) -> Settings:
    return {"policy_loss": clip_of(c)}


def clipped_with_length(c: Case) -> Settings:
    width = policy_of(c).mask.shape[-1]
    length = c.args.get("loss_scale_factor") or c.args.get("max_completion_length") or width
    return {**clips(c), "aggregation": {"length": length}}


def weights(c: Case) -> Settings:
    return {"policy_loss": around_one(c)}


def verl_loss(name: str, settings: Callable[[Case], Settings] = clips, mode: str | None = "token-mean") -> Recorded:
    def chosen(c: Case) -> bool:
        return c.inputs["rollout_is_weights"] is None and mode in (None, c.args["loss_agg_mode"])

    return Recorded(f"policy_loss.{name}", tensors, settings, chosen, ("loss", "grad_log_prob"))


def held(c: Case) -> Settings:
    term = algorithms.kl_cov(fraction=c.args["kl_cov_ratio"], kl_coef=c.args["ppo_kl_coef"]).loss_terms
    return {"loss_terms": term}


def trl_loss(name: str, settings: Callable[[Case], Settings] = clips, *, level: str = "token") -> Recorded:
    options = {"beta", "vllm_is", "top_entropy_quantile", "off_policy_mask_threshold", "delta"}

    def chosen(c: Case) -> bool:
        plain = not any(c.args.get(option) for option in options)
        return plain and c.args.get("importance_sampling_level", "token") == level

    return Recorded(f"trl_grpo_loss.{name}", tensors, settings, chosen, ("loss", "grad_log_prob"))


def loss_of(peer: str, primitive: str, settings: Callable[[Case], Settings] = clips) -> Recorded:
    return Recorded(primitive, tensors, settings, names=("loss", NAMES[peer][3]))


def masked_weights(c: Case) -> Settings:
    rule = c.args["rejection_sampling"]
    bounds = {"action": rule["action"], "low": rule["lower"], "high": rule["upper"]}
    return {**clips(c), "corrections": [use(corrections.importance_weights, **bounds)]}


def skyrl_loss(name: str, settings: Callable[[Case], Settings] = clips) -> Recorded:
    """SkyRL sums: its advantages hold the denominators, see skyrl_advantage_scaling."""
    return loss_of("skyrl", f"skyrl_loss.{name}", lambda c: {**settings(c), "aggregation": losses.token_sum})


def slime_loss(name: str, settings: Callable[[Case], Settings] = clips) -> Recorded:
    """Recorded per token, with the gradient of the sum."""
    return Recorded(
        name,
        tensors,
        lambda c: {**settings(c), "aggregation": losses.token_sum},
        lambda c: not c.args.get("eps_clip_c"),
        ("pg_losses", "grad_log_probs"),
    )


def prime_loss(name: str, settings: Callable[[Case], Settings]) -> Recorded:
    """Recorded for each sequence, with the gradient of the sum; its old policy is the one that sampled."""

    def data(c: Case) -> Data:
        p = policy_of(c)
        return {**tensors(c), "rollout_log_probs": p.old_log_probs, "advantages": c.args["adv_tau"] * p.advantages}

    def with_penalty(c: Case) -> Settings:
        term = {"coefficient": 2 * c.args["kl_tau"], "loss": algorithms.kl_to_sampler}
        return {**settings(c), "loss_terms": [term], "aggregation": losses.token_sum}

    return Recorded(f"prime_loss.{name}", data, with_penalty, names=("per_sequence_loss", "grad_logprobs"))


def prime_masks(c: Case) -> Settings:
    return {"policy_loss": {"threshold_low": c.args["dppo_mask_low"], "threshold_high": c.args["dppo_mask_high"]}}


def whole_responses(c: Case) -> Data:
    """TRL's RLOO has the old log-prob of a response: share it out."""
    mask = c.inputs["completion_mask"].bool()
    shares = c.inputs["old_logps"] / sequence_lengths(mask).clamp(min=1)
    return {**tensors(c), "old_log_probs": shares[:, None].expand(mask.shape)}


def no_empty_response(c: Case) -> bool:
    """TRL gives one a constant, −A."""
    return bool(c.inputs["completion_mask"].bool().any(1).all())


def values(c: Case) -> Data:
    new, old, mask = (
        ("vpreds", "values", "response_mask") if c.peer == "verl" else ("values", "old_values", "action_mask")
    )
    m = c.inputs[mask].bool()
    columns = {"new_values": leaf(c.inputs[new]), "values": c.inputs[old], "returns": c.inputs["returns"]}
    return {**columns, "response_mask": m, "totals": totals_of(c, m)}


VERL_VALUE = Recorded(
    "value_loss",
    values,
    lambda c: {"value_loss": {"clip": c.args["cliprange_value"]}},
    lambda c: c.args["loss_agg_mode"] == "token-mean",
    ("loss", "grad_vpreds"),
)
OPENRLHF_VALUE = Recorded(
    "openrlhf_value_loss",
    values,
    lambda c: {"value_loss": {"clip": c.args["clip_eps"]}},
    lambda c: c.args["token_level_loss"],
    ("loss", "grad_values"),
)


@dataclass(frozen=True)
class Entry:
    advantages: Recorded | str
    loss: Recorded | str
    """A string says why nothing was recorded."""
    values: Recorded | None = None


VERL_PPO, OPENRLHF_PPO = verl_loss("vanilla"), loss_of("openrlhf", "openrlhf_policy_loss.ppo")
NOT_RECORDED = "the advantages were not recorded; the formula is that of the reference, without a number to hold it to"
SKYRL_CISPO = skyrl_loss("cispo", lambda c: {})


def verl_rewards(name: str, settings: Callable[[Case], Settings] = lambda c: {}) -> Recorded:
    return Recorded(f"advantage.{name}", verl_rows, settings)


def discounts(*names: str, stage: str = "advantage", **renamed: str) -> Callable[[Case], Settings]:
    ours = {name: name for name in names} | renamed
    return lambda c: {stage: {name: c.args[theirs] for name, theirs in ours.items()}}


def vapo_settings(c: Case) -> Settings:
    return {
        "advantage": {"alpha": c.args["length_adaptive_alpha"], "gamma": c.args["gae_gamma"]},
        "value_target": {"lam": c.args["gae_lambda_value"], "gamma": c.args["gae_gamma"]},
    }


ENTRIES: dict[tuple[str, str], Entry] = {
    ("verl-0.9", "ppo"): Entry(
        Recorded("advantage.gae", verl_rows, discounts("gamma", "lam"), names=("advantages", "returns")),
        VERL_PPO,
        VERL_VALUE,
    ),
    ("verl-0.9", "grpo"): Entry(VERL_GRPO, VERL_PPO),
    ("verl-0.9", "dr_grpo"): Entry(
        Recorded("advantage.grpo", verl_rows, chosen=lambda c: not verl_divides(c)),
        verl_loss("vanilla", clipped_with_length, "seq-mean-token-sum-norm"),
    ),
    ("verl-0.9", "dapo"): Entry(VERL_GRPO, VERL_PPO),
    ("verl-0.9", "rloo"): Entry(verl_rewards("rloo"), VERL_PPO),
    ("verl-0.9", "remax"): Entry(verl_rewards("remax"), VERL_PPO),
    ("verl-0.9", "reinforce_pp"): Entry(verl_rewards("reinforce_plus_plus", discounts("gamma")), VERL_PPO),
    ("verl-0.9", "reinforce_pp_baseline"): Entry(verl_rewards("reinforce_plus_plus_baseline"), VERL_PPO),
    ("verl-0.9", "opo"): Entry(verl_rewards("opo"), VERL_PPO),
    ("verl-0.9", "gpg"): Entry(verl_rewards("gpg"), verl_loss("gpg", lambda c: {})),
    ("verl-0.9", "pass_at_k_training"): Entry(
        Recorded("advantage.grpo_passk", verl_rows, verl_eps, verl_divides), VERL_PPO
    ),
    ("verl-0.9", "gdpo"): Entry(verl_rewards("gdpo", discounts("weights", eps="epsilon")), VERL_PPO),
    ("verl-0.9", "gspo"): Entry(VERL_GRPO, verl_loss("gspo", mode="seq-mean-token-mean")),
    ("verl-0.9", "cispo"): Entry(VERL_GRPO, verl_loss("cispo", weights)),
    ("verl-0.9", "sapo"): Entry(VERL_GRPO, verl_loss("sapo", lambda c: {}, mode=None)),
    ("verl-0.9", "gmpo"): Entry(VERL_GRPO, verl_loss("geo_mean", mode=None)),
    ("verl-0.9", "kl_cov"): Entry(VERL_GRPO, verl_loss("kl_cov", held)),
    ("trl-1.16", "grpo"): Entry(trl_advantage(), trl_loss("grpo")),
    ("trl-1.16", "dr_grpo"): Entry(trl_advantage("none"), trl_loss("dr_grpo", clipped_with_length)),
    ("trl-1.16", "dapo"): Entry(trl_advantage(), trl_loss("dapo")),
    ("trl-1.16", "lite_ppo"): Entry(trl_advantage("batch"), trl_loss("bnpo")),
    ("trl-1.16", "gdpo"): Entry(trl_advantage(how="normalize_then_sum"), trl_loss("dapo")),
    ("trl-1.16", "gspo"): Entry(trl_advantage(), trl_loss("grpo", level="sequence")),
    ("trl-1.16", "luspo"): Entry(trl_advantage(), trl_loss("luspo", level="sequence")),
    ("trl-1.16", "cispo"): Entry(
        trl_advantage(), trl_loss("cispo", lambda c: {"policy_loss": {"w_max": c.args["epsilon_high"]}})
    ),
    ("trl-1.16", "sapo"): Entry(
        trl_advantage(), trl_loss("sapo", lambda c: {"policy_loss": {"tau_neg": torch.tensor(1.05).item()}})
    ),
    ("trl-1.16", "rloo"): Entry(
        "tests/peers trains with it",
        Recorded("trl_rloo_loss", whole_responses, clips, no_empty_response, ("loss", "grad_log_prob")),
    ),
    ("openrlhf-0.11", "ppo"): Entry(
        Recorded(
            "openrlhf_gae",
            gae_rows,
            lambda c: {"normalization": None, **discounts("gamma", lam="lambd")(c)},
            names=("advantages", "returns"),
        ),
        OPENRLHF_PPO,
        OPENRLHF_VALUE,
    ),
    ("openrlhf-0.11", "grpo"): Entry(openrlhf_advantage("group_norm"), OPENRLHF_PPO),
    ("openrlhf-0.11", "dr_grpo"): Entry(openrlhf_advantage("dr_grpo"), OPENRLHF_PPO),
    ("openrlhf-0.11", "rloo"): Entry(openrlhf_advantage("rloo"), OPENRLHF_PPO),
    ("openrlhf-0.11", "reinforce_pp"): Entry(
        "recorded in two parts, openrlhf_reward_to_go and openrlhf_masked_normalize: see the test of the parts",
        OPENRLHF_PPO,
    ),
    ("openrlhf-0.11", "reinforce_pp_baseline"): Entry(openrlhf_advantage("reinforce_baseline"), OPENRLHF_PPO),
    ("nemo-rl-2026.08", "dapo"): Entry(NEMO_GRPO, loss_of("nemo_rl", "nemo_loss.ppo")),
    ("nemo-rl-2026.08", "vapo"): Entry(
        Recorded(
            "nemo_gae",
            nemo_rows,
            vapo_settings,
            lambda c: c.args["gae_lambda_value"] is not None,
            ("advantages", "returns"),
        ),
        loss_of("nemo_rl", "nemo_loss.ppo", lambda c: {**clips(c), "loss_terms": ()}),
    ),
    ("nemo-rl-2026.08", "gspo"): Entry(NEMO_GRPO, loss_of("nemo_rl", "nemo_loss.gspo")),
    ("nemo-rl-2026.08", "cispo"): Entry(NEMO_GRPO, loss_of("nemo_rl", "nemo_loss.cispo", weights)),
    ("skyrl-2026.08", "grpo"): Entry(NOT_RECORDED, skyrl_loss("regular")),
    ("skyrl-2026.08", "dapo"): Entry(NOT_RECORDED, skyrl_loss("regular")),
    ("skyrl-2026.08", "gspo"): Entry(NOT_RECORDED, skyrl_loss("gspo")),
    ("skyrl-2026.08", "sapo"): Entry(NOT_RECORDED, skyrl_loss("sapo", lambda c: {})),
    ("skyrl-2026.08", "cispo"): Entry(NOT_RECORDED, SKYRL_CISPO),
    ("skyrl-2026.08", "dppo"): Entry(NOT_RECORDED, skyrl_loss("dppo_tv", lambda c: {})),
    ("slime-2026.08", "grpo"): Entry(NOT_RECORDED, slime_loss("slime_policy_loss_tokens")),
    ("slime-2026.08", "cispo"): Entry(NOT_RECORDED, slime_loss("slime_cispo_tokens", weights)),
    ("areal-2026.05", "grpo"): Entry(AREAL_GRPO, loss_of("areal", "areal_ppo_loss.token")),
    ("areal-2026.05", "decoupled_ppo"): Entry(
        AREAL_GRPO, loss_of("areal", "areal_ppo_loss.token_rs_ratio_token_mask", masked_weights)
    ),
    ("prime-rl-2026.08", "grpo"): Entry(NOT_RECORDED, prime_loss("dppo_kl", prime_masks)),
    ("prime-rl-2026.09", "grpo"): Entry(
        NOT_RECORDED, prime_loss("ipo", lambda c: {"policy_loss": {"threshold": c.args["ipo_threshold"]}})
    ),
    ("areal-2026.05", "sapo"): Entry(AREAL_GRPO, loss_of("areal", "areal_sapo_loss.token", lambda c: {})),
}

PEERS = {name: name.rpartition("-")[0].replace("-", "_") for name in DIALECTS}


def made(dialect: str, preset: str, **changes: Any) -> Algorithm:
    arguments = {"kl_coef": 0.0} if preset == "grpo" else {}
    return PRESETS[preset](dialect=dialect, **arguments).replace(**changes)


def recorded(part: str) -> list[Any]:
    return [
        pytest.param(dialect, preset, source, id=f"{dialect}-{preset}")
        for (dialect, preset), entry in ENTRIES.items()
        if isinstance(source := getattr(entry, part), Recorded)
    ]


def of(dialect: str, source: Recorded) -> list[Case]:
    peer = PEERS[dialect]
    found = [c for c in CASES if (c.peer, c.primitive) == (peer, source.primitive) and source.chosen(c) and c.expected]
    assert found, f"no case of {peer} is one of {source.primitive}"
    return found


def check(c: Case, got: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
    """As in test_golden, with its differences."""
    ours = difference(c)
    for name in names:
        want = c.expected[name]
        keep = None if ours is None else ours.keep(c, name, want)
        if ours is None or keep is not None:
            error = c.error(name, got[name], want, keep, ours.tolerance if ours else None)
            assert error is None, f"{c.id} {error}"


@pytest.mark.parametrize(("dialect", "preset", "source"), recorded("advantages"))
def test_the_advantages_are_the_librarys(dialect: str, preset: str, source: Recorded) -> None:
    for c in of(dialect, source):
        data = source.data(c)
        penalty = {"kl_in_reward": {}} if "ref_log_probs" in data else {}
        algorithm = made(dialect, preset, **source.settings(c), **penalty)
        got = algorithms.estimate_advantages(algorithm, data, kl_coef=1.0)
        per_response = {name: got["advantages"][:, 0] for name in c.expected if c.expected[name].dim() == 1}
        check(c, {**got, **per_response}, source.names)


@pytest.mark.parametrize(("dialect", "preset", "source"), recorded("loss"))
def test_the_loss_and_its_gradient_are_the_librarys(dialect: str, preset: str, source: Recorded) -> None:
    for c in of(dialect, source):
        algorithm, data = made(dialect, preset, **source.settings(c)), source.data(c)
        data |= algorithms.token_weights(algorithm, data)
        ranks = 1 if c.primitive == "policy_loss.geo_mean" else c.args.get("dp_size", 1)
        loss = algorithms.policy_objective(algorithm, data) * ranks
        per_token = algorithm.policy_loss(data).detach()
        gradient = slope(loss, data["log_probs"])
        rows = sequence_sum(algorithms.policy_losses(algorithm, data).detach(), data["response_mask"])
        got = {"loss": loss.detach(), "pg_losses": per_token, "per_sequence_loss": rows, NAMES[c.peer][3]: gradient}
        check(c, got, source.names)


@pytest.mark.parametrize(("dialect", "preset", "source"), recorded("values"))
def test_the_value_loss_is_the_librarys(dialect: str, preset: str, source: Recorded) -> None:
    for c in of(dialect, source):
        algorithm, data = made(dialect, preset, **source.settings(c)), source.data(c)
        loss = algorithms.value_objective(algorithm, data) * c.args.get("dp_size", 1)
        check(c, {"loss": loss.detach(), source.names[1]: slope(loss, data["new_values"])}, source.names)


def test_every_entry_is_held_to_something() -> None:
    assert set(ENTRIES) == {(dialect, preset) for dialect, presets in DIALECTS.items() for preset in presets}
    assert all(isinstance(entry.loss, Recorded) for entry in ENTRIES.values())


def normalized(x: Tensor, mask: Tensor) -> Tensor:
    """OpenRLHF's, of the tokens of a batch: the variance of all of them, not of a sample."""
    x = x.double()
    return torch.where(mask, (x - x[mask].mean()) * x[mask].var(unbiased=False).clamp(min=1e-8).rsqrt(), 0.0)


def test_openrlhfs_normalization_is_what_it_recorded_of_a_row() -> None:
    for c in (c for c in CASES if c.primitive == "openrlhf_masked_normalize"):
        for x, mask, want in zip(c.inputs["tensor"], c.inputs["mask"].bool(), c.outputs["out"], strict=True):
            if mask.sum() > 1:
                torch.testing.assert_close(normalized(x, mask), want.double(), rtol=c.rtol, atol=c.atol)


@pytest.mark.parametrize(
    ("preset", "primitive", "name"),
    [("ppo", "openrlhf_gae", "advantages"), ("reinforce_pp", "openrlhf_reward_to_go", "returns")],
)
def test_openrlhfs_two_parts_together(preset: str, primitive: str, name: str) -> None:
    found = [c for c in CASES if c.primitive == primitive and difference(c) is None]
    assert found
    for c in found:
        mask, values = c.inputs["action_mask"].bool(), c.inputs.get("values")
        changes = {"gamma": c.args["gamma"]} | ({"lam": c.args["lambd"]} if preset == "ppo" else {})
        algorithm = made("openrlhf-0.11", preset, advantage=changes, kl_in_reward={})
        data = {**paid(c.inputs["rewards"]), "values": values, "response_mask": mask}
        got = algorithms.estimate_advantages(algorithm, data, kl_coef=1.0)["advantages"]
        torch.testing.assert_close(got.double(), normalized(c.outputs[name], mask), rtol=c.rtol, atol=c.atol)


def test_an_unknown_dialect_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"dialect='verl-0.8', expected one of verl-0.9, trl-1.16, "):
        algorithms.grpo(dialect="verl-0.8")  # type: ignore[arg-type]


def test_a_preset_that_the_library_does_not_have_names_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"remax has no dialect 'slime-2026.08'; its presets are grpo, cispo"):
        algorithms.remax(dialect="slime-2026.08")


def test_a_dialect_changes_settings_and_not_the_algorithm() -> None:
    found = algorithms.diff(algorithms.dapo(), algorithms.dapo(dialect="nemo-rl-2026.08"))
    assert found == {}
    found = algorithms.diff(algorithms.sapo(), algorithms.sapo(dialect="trl-1.16"))
    assert found == {"advantage.eps": (1e-6, 1e-4)}


def test_trls_kl_is_weighed_by_the_ratio() -> None:
    found = [c for c in CASES if c.primitive == "trl_grpo_loss.grpo" and c.args.get("use_bias_correction_kl")]
    assert found
    for c in found:
        algorithm = algorithms.grpo(kl_coef=c.args["beta"], dialect="trl-1.16").replace(**clips(c))
        data = {**tensors(c), "ref_log_probs": c.inputs["ref_per_token_logps"]}
        loss = algorithms.policy_objective(algorithm, data)
        check(c, {"loss": loss.detach(), "grad_log_prob": slope(loss, data["log_probs"])}, ("loss", "grad_log_prob"))


def test_verls_group_of_one_keeps_its_reward() -> None:
    """But for its division by 1 + ε, which is no deviation of anything."""
    (c,) = (c for c in CASES if c.id == "verl/advantage.grpo/006")
    algorithm = made("verl-0.9", "grpo", kl_in_reward={})
    got = algorithms.estimate_advantages(algorithm, verl_rows(c), kl_coef=1.0)["advantages"]
    torch.testing.assert_close(got, c.outputs["advantages"], rtol=2e-6, atol=1e-7)


SKYRL_MEANS = {losses.token_mean: "token_mean", losses.seq_mean_token_mean: "sequence_mean"}


@pytest.mark.parametrize("preset", DIALECTS["skyrl-2026.08"])
def test_skyrls_sum_of_scaled_advantages_is_the_dialects_mean(preset: str) -> None:
    aggregation = made("skyrl-2026.08", preset).aggregation
    mean = SKYRL_MEANS[aggregation.fn]
    found = [c for c in CASES if c.primitive == "skyrl_advantage_scaling" and c.args["loss_reduction"] == mean]
    assert found
    for c in found:
        per_token, mask = leaf(c.inputs["advantages"]), c.inputs["loss_mask"].bool()
        totals = Totals(tokens=int(mask.sum()), sequences=len(mask), groups=0)
        loss = aggregation({"losses": per_token, "response_mask": mask, "totals": totals})
        check(c, {"scaled": slope(loss, per_token) * c.inputs["advantages"]}, ("scaled",))
