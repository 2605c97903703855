"""Our numbers against those that other libraries computed, and the one table of where and why they differ."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest
import torch
from torch import Tensor

from rlprims.grouping import dense_ids, group_count
from tests.golden_calls import CALLS
from tests.golden_cases import Answer, Case, cases

Keep = Callable[[Case, str, Tensor], Tensor | None]
"""Which entries of a peer's output must still agree with ours; None: none of them."""

MASKS = ("response_mask", "action_mask", "loss_mask", "token_mask", "mask")


def token_mask(c: Case) -> Tensor:
    return next(c.inputs[name].bool() for name in MASKS if name in c.inputs)


def rows(kept: Tensor, want: Tensor) -> Tensor:
    return kept.reshape(-1, *[1] * (want.dim() - 1)).expand(want.shape)


def inside_the_mask(c: Case, name: str, want: Tensor) -> Tensor | None:
    mask = token_mask(c)
    return mask if want.shape == mask.shape else torch.ones_like(want, dtype=torch.bool)


def below_the_cap(c: Case, name: str, want: Tensor) -> Tensor | None:
    return c.outputs["kl"].abs() < 10


def group_ids(c: Case) -> Tensor:
    return dense_ids(next(c.inputs[name] for name in ("index", "uid", "gidx") if name in c.inputs))


def groups_of_several(c: Case, name: str, want: Tensor) -> Tensor | None:
    ids = group_ids(c)
    several = group_count(ids) > 1
    if c.primitive == "stats.group_mean_std":
        several = c.inputs["gidx"].bincount() > 1
    return rows(several, want)


def groups_without_empty_responses(c: Case, name: str, want: Tensor) -> Tensor | None:
    ids, empty = group_ids(c), ~token_mask(c).any(-1)
    return rows(~torch.isin(ids, ids[empty]), want)


def rows_without_gaps(c: Case, name: str, want: Tensor) -> Tensor | None:
    mask = token_mask(c)
    gaps = (mask[:, 1:] & ~mask[:, :-1]).any(-1)
    return mask & rows(~gaps, want)


def groups_without_gaps(c: Case, name: str, want: Tensor) -> Tensor | None:
    if name == "returns":
        return token_mask(c)
    ids, mask = group_ids(c), token_mask(c)
    gaps = (mask[:, 1:] & ~mask[:, :-1]).any(-1)
    return mask & rows(~torch.isin(ids, ids[gaps]) & (group_count(ids) > 1), want)


def rewards_inside_the_mask(c: Case, name: str, want: Tensor) -> Tensor | None:
    return token_mask(c) if name == "token_level_rewards" else None


def baselines_only(c: Case, name: str, want: Tensor) -> Tensor | None:
    return torch.ones_like(want, dtype=torch.bool) if name == "baseline" else None


def everywhere(c: Case, name: str, want: Tensor) -> Tensor | None:
    return torch.ones_like(want, dtype=torch.bool)


def tokens_with_company(c: Case, name: str, want: Tensor) -> Tensor | None:
    return token_mask(c) & rows(group_count(group_ids(c)) > 1, want)


def finite(c: Case, name: str, want: Tensor) -> Tensor | None:
    return want.isfinite()


def below_the_largest(c: Case, name: str, want: Tensor) -> Tensor | None:
    return c.inputs["entropies"] < c.inputs["entropies"][token_mask(c)].max() if name == "mask" else None


def nowhere(c: Case, name: str, want: Tensor) -> Tensor | None:
    return None


@dataclass(frozen=True)
class Difference:
    """A choice of ours, and where the peer's number still holds."""

    why: str
    cases: tuple[str, ...]
    keep: Keep
    tolerance: tuple[float, float] | None = None
    """Relative and absolute, where the peer's precision is not the case's."""


DIFFERENCES = [
    Difference(
        "The deviation is that of the whole group. NeMo-RL leaves the sample out of its own, which can vanish.",
        (
            "nemo_rl/nemo_baseline_std/00[026]",
            "nemo_rl/nemo_grpo_advantage/00[04]",
            "nemo_rl/nemo_grpo_advantage/012",
        ),
        baselines_only,
    ),
    Difference(
        "Outside the mask our outputs are 0. These peers leave a number there, and count on the loss to mask it.",
        (
            "verl/advantage.remax/00[26]",
            "nemo_rl/nemo_grpo_advantage/00[123567]",
            "nemo_rl/nemo_grpo_advantage/01[345]",
            "openrlhf/openrlhf_compute_reward/*",
            "skyrl/skyrl_advantage_scaling/00[01234]",
            "skyrl/skyrl_advantage_scaling/01?",
            "slime/slime_policy_loss_tokens/00[014567]",
            "slime/slime_approx_kl.*/00[014567]",
            "slime/slime_cispo_tokens/00[023]",
            "slime/slime_gspo_kl/00[023]",
            "slime/slime_opsm_mask/00[023]",
            "slime/slime_rfpp_baseline/*",
            "nemo_rl/nemo_gdpo_advantage/*",
        ),
        inside_the_mask,
    ),
    Difference(
        "verl sums a response's rewards over the padding too. Masked means absent: a response without a token has "
        "reward 0, whatever stands in its padding.",
        ("verl/advantage.grpo*/01[01]", "verl/advantage.rloo*/005"),
        groups_without_empty_responses,
    ),
    Difference(
        "The same, where a statistic of the batch carries it to every row.",
        (
            "verl/advantage.gdpo_single/01[01]",
            "verl/advantage.gpg/005",
            "verl/advantage.reinforce_plus_plus_baseline/005",
        ),
        nowhere,
    ),
    Difference(
        "All tokens have the same return, so whitening leaves 0. These peers amplify the rounding of the mean: 1000.1 "
        "on every token becomes -0.5.",
        (
            "verl/advantage.reinforce_plus_plus/008",
            "verl/advantage.reinforce_plus_plus/014",
            "nemo_rl/nemo_rfpp_advantage/005",
        ),
        nowhere,
    ),
    Difference(
        "A token that nobody else of the group has is its own baseline, also in a group of one, where verl keeps the "
        "return; its returns do not stop at tool tokens; and its ε is in the divisor only, which draws baselines to 0.",
        (
            "verl/advantage.optimal_token_baseline/009",
            "verl/advantage.optimal_token_baseline/011",
            "verl/advantage.optimal_token_baseline/02[57]",
            "verl/advantage.tir_optimal_token_baseline/00[89]",
            "verl/advantage.tir_optimal_token_baseline/01[01]",
            "verl/advantage.tir_optimal_token_baseline/02[4567]",
            "verl/advantage.*optimal_token_baseline/0[12][135]",
        ),
        tokens_with_company,
        tolerance=(1e-6, 1e-7),
    ),
    Difference(
        "The tail of the longest response begins where it is alone. verl counts tokens and cuts columns, which are "
        "others where a response has a gap.",
        (
            "verl/advantage.optimal_token_baseline/008",
            "verl/advantage.optimal_token_baseline/010",
            "verl/advantage.optimal_token_baseline/02[46]",
        ),
        groups_without_gaps,
        tolerance=(1e-6, 1e-7),
    ),
    Difference(
        "Equal returns of 1000.1 give exactly 0, also in float32; verl leaves the rounding of the sum.",
        ("verl/advantage.*optimal_token_baseline/02[89]", "verl/advantage.*optimal_token_baseline/03[01]"),
        everywhere,
        tolerance=(2e-5, 2e-4),
    ),
    Difference(
        "A group of one has no baseline. verl's RLOO keeps the raw reward, and its GRPO divides it by 1 + ε even under "
        "the rule that we call singleton='raw'; verl calls the group's mean 0 and its deviation 1.",
        (
            "verl/advantage.rloo/003",
            "verl/advantage.grpo/006",
            "verl/advantage.grpo_vectorized/006",
            "verl/advantage.grpo_labels*/001",
            "verl/stats.group_mean_std/000",
        ),
        groups_of_several,
    ),
    Difference(
        "A group of one cannot teach, so the filter drops it. verl keeps it.",
        ("verl/group_filter/001",),
        groups_of_several,
    ),
    Difference(
        "KL estimates are not capped at 10, which takes the gradient away where the drift is largest; OpenRLHF and "
        "NeMo-RL cap k1 and k2 as well.",
        (
            "verl/kl_penalty/01[78]",
            "verl/kl_penalty/02[039]",
            "verl/kl_penalty/03[025]",
            "openrlhf/openrlhf_approx_kl.*/001",
            "nemo_rl/nemo_kl.*/00[23]",
        ),
        below_the_cap,
    ),
    Difference(
        "Tool tokens neither discount nor bootstrap: the result is that of the sequence without them. OpenRLHF "
        "discounts across them.",
        ("openrlhf/openrlhf_gae/003", "openrlhf/openrlhf_reward_to_go/003"),
        rows_without_gaps,
    ),
    Difference(
        "A response without tokens is not counted in the mean KL that drives the coefficient, and a score in its "
        "padding is not read.",
        ("verl/apply_kl_penalty/00[45]",),
        rewards_inside_the_mask,
    ),
    Difference(
        "Rewards of 1000.1 in float32: verl is 1e-4 from the float64 oracle and we are 3e-5; see the test of oracles.",
        ("verl/advantage.gae/014",),
        nowhere,
    ),
    Difference(
        "A response without tokens has no perplexity and no ratio. verl counts it as one of 1 in its means.",
        ("verl/offpolicy_metrics/00[23]",),
        lambda c, name, want: everywhere(c, name, want) if name in ("kl", "k3_kl", "chi2_token") else None,
    ),
    Difference(
        "The token on the quantile of the entropies is kept. TRL rounds the quantile to float32, and loses it if that "
        "is up.",
        ("trl/trl_high_entropy_mask/00[37]", "trl/trl_grpo_loss.grpo/005"),
        below_the_largest,
    ),
    Difference(
        "Fewer than two valid rows have a deviation of 0. TRL's is NaN.",
        ("trl/nanstd/001",),
        finite,
    ),
    Difference(
        "Other parts, of no more work: see the test of parts.",
        ("verl/seqlen_balance/00[013]",),
        nowhere,
    ),
    Difference(
        "SkyRL's ratio is float32 in a case of float64.",
        (
            "skyrl/skyrl_loss.regular/003",
            "skyrl/skyrl_loss.regular_tis_seq/003",
            "skyrl/skyrl_loss.dual_clip/003",
            "skyrl/skyrl_loss.dppo_*/003",
        ),
        everywhere,
        tolerance=(2e-5, 2e-6),
    ),
]

CASES = list(cases())


def difference(c: Case) -> Difference | None:
    return next((d for d in DIFFERENCES if any(fnmatch(c.id, pattern) for pattern in d.cases)), None)


def answer(c: Case) -> Answer:
    return CALLS[c.peer, c.primitive](c)


def is_refused(c: Case) -> bool:
    """A wrong call of the container. The other cases in which a peer raised are legal, if degenerate."""
    return bool(c.raises) and c.recommend == "match" and c.primitive.startswith("dataproto")


@pytest.mark.parametrize("case", [c for c in CASES if not is_refused(c)], ids=lambda c: c.id)
def test_the_peers_number(case: Case) -> None:
    """Equal to the peer, or to the oracle where the peer is wrong; where we differ, equal to it elsewhere."""
    got, ours = answer(case), difference(case)
    if not case.expected:  # the peer raised, or has an answer that is of no use
        assert all(x.isfinite().all() for x in got.values())
    if ours is None:
        assert not case.errors(got)
        return
    for name, want in case.expected.items():
        keep = ours.keep(case, name, want)
        assert got[name].isfinite().all()
        if keep is not None:
            assert case.error(name, got[name], want, keep, ours.tolerance) is None


@pytest.mark.parametrize("case", [c for c in CASES if is_refused(c)], ids=lambda c: c.id)
def test_golden_calls_that_the_peer_refuses_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match=r"chunk|union"):
        answer(case)


@pytest.mark.parametrize("ours", DIFFERENCES, ids=lambda d: d.why.split(".")[0])
def test_every_difference_is_one(ours: Difference) -> None:
    """No pattern of the table is idle, and none excuses a case that agrees."""
    for pattern in ours.cases:
        mine = [c for c in CASES if fnmatch(c.id, pattern) and difference(c) is ours]
        assert mine, f"{pattern} excuses no case"
        for case in mine:
            assert case.errors(answer(case)), f"{case.id} agrees by now"


def test_every_call_has_a_case() -> None:
    assert set(CALLS) == {(c.peer, c.primitive) for c in CASES}


ORACLES = [c for c in CASES if c.oracle and (difference(c) is None or c.id == "verl/advantage.gae/014")]


@pytest.mark.parametrize("case", ORACLES, ids=lambda c: c.id)
def test_we_are_as_near_to_the_oracle_as_the_peer(case: Case) -> None:
    """Independent float64 answers: 1e-12 in float64; in float32 within tolerance, or nearer than the peer is."""
    got = answer(case)
    for name, want in case.oracle.items():
        double = got[name].dtype is torch.float64
        mine = (got[name].double() - want.double()).abs()
        bound = (1e-12 if double else case.rtol) * want.double().abs().clamp(min=1.0)
        if (mine <= bound).all():
            continue
        kept = case.inputs[case.where[name]].bool() if name in case.where else torch.ones_like(mine, dtype=torch.bool)
        peer = (case.outputs[name].double() - want.double()).abs()[kept]
        assert mine.max() < peer.max(), f"{name}: {mine.max():.3g} from the oracle, the peer {peer.max():.3g}"


@pytest.mark.parametrize("case", [c for c in CASES if c.primitive == "seqlen_balance"], ids=lambda c: c.id)
def test_no_part_is_heavier_than_the_peers_heaviest(case: Case) -> None:
    got, lengths = answer(case), case.inputs["seqlens"]
    sums = torch.zeros_like(case.outputs["partition_sums"]).index_add(0, got["partition_of"], lengths)
    assert torch.equal(got["partition_sums"], sums)
    assert sums.max() <= case.outputs["partition_sums"].max()
    if case.args["equal_size"]:
        assert got["partition_of"].bincount().unique().numel() == 1


def test_the_number_of_cases() -> None:
    """A case that vanishes from the index is a promise that vanishes."""
    assert Counter(c.peer for c in CASES) == {
        "verl": 978,
        "trl": 150,
        "nemo_rl": 95,
        "openrlhf": 92,
        "skyrl": 74,
        "areal": 71,
        "slime": 62,
        "rlax": 56,
        "torchrl": 40,
        "prime_rl": 12,
    }
