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


def rewards_inside_the_mask(c: Case, name: str, want: Tensor) -> Tensor | None:
    return token_mask(c) if name == "token_level_rewards" else None


def nowhere(c: Case, name: str, want: Tensor) -> Tensor | None:
    return None


@dataclass(frozen=True)
class Difference:
    """A choice of ours, and where the peer's number still holds."""

    why: str
    cases: tuple[str, ...]
    keep: Keep


DIFFERENCES = [
    Difference(
        "Outside the mask our outputs are 0. These peers leave a number there, and count on the loss to mask it.",
        (
            "verl/advantage.remax/*",
            "nemo_rl/nemo_grpo_advantage/*",
            "openrlhf/openrlhf_compute_reward/*",
            "skyrl/skyrl_advantage_scaling/*",
            "slime/slime_policy_loss_tokens/*",
            "slime/slime_approx_kl.*/*",
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
        "A group of one has no baseline. verl's RLOO keeps the raw reward, and its GRPO divides it by 1 + ε even under "
        "the rule that we call singleton='raw'; verl calls the group's mean 0 and its deviation 1.",
        (
            "verl/advantage.rloo/003",
            "verl/advantage.grpo*/006",
            "verl/advantage.grpo_labels*/001",
            "verl/stats.group_mean_std/*",
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
            "nemo_rl/nemo_kl.*/002",
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
        "SkyRL's sum in float64 is 1e-7 from ours, as if part of it were float32; its gradient agrees.",
        ("skyrl/skyrl_loss.*/003",),
        lambda c, name, want: None if name == "loss" else torch.ones_like(want, dtype=torch.bool),
    ),
]

CASES = list(cases())


def difference(c: Case) -> Difference | None:
    return next((d for d in DIFFERENCES if any(fnmatch(c.id, pattern) for pattern in d.cases)), None)


def answer(c: Case) -> Answer:
    return CALLS[c.peer, c.primitive](c)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_peers_number(case: Case) -> None:
    """Equal to the peer, or to the oracle where the peer is wrong; where we differ, equal to it elsewhere."""
    got, ours = answer(case), difference(case)
    if ours is None:
        assert not case.errors(got)
        return
    for name, want in case.expected.items():
        keep = ours.keep(case, name, want)
        assert got[name].isfinite().all()
        if keep is not None:
            assert case.error(name, got[name], want, keep) is None


@pytest.mark.parametrize("ours", DIFFERENCES, ids=lambda d: d.why.split(".")[0])
def test_every_difference_is_one(ours: Difference) -> None:
    """No pattern of the table is idle."""
    for pattern in ours.cases:
        assert any(fnmatch(c.id, pattern) and c.errors(answer(c)) for c in CASES), f"{pattern} agrees by now"


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


def test_the_number_of_cases() -> None:
    """A case that vanishes from the index is a promise that vanishes."""
    assert Counter(c.peer for c in CASES) == {
        "verl": 328,
        "trl": 61,
        "openrlhf": 72,
        "nemo_rl": 45,
        "slime": 33,
        "skyrl": 28,
        "areal": 25,
        "rlax": 24,
        "torchrl": 5,
    }
