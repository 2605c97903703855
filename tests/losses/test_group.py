"""Losses of a group: its responses are compared with each other."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm
from rlprims.grouping import dense_ids
from rlprims.losses import dpo, flowrl, gvpo, online_dpo, prompt_token_mean, rewards_as_labels, seq_mean_token_mean
from rlprims.testing import check_loss
from tests.records import DETACHED_WEIGHT, Record, one_more

GROWS = {"impossible tokens are finite": "grows with the log-ratio, which is infinite"}

RECORDS = [
    Record(
        "losses.gvpo",
        check_loss,
        matters={"beta": 1.0, "all_reduce_rows": one_more},
        exempt={"on policy it is reinforce": "a response's weight is relative to its group, and grows with β", **GROWS},
    ),
    Record(
        "losses.rewards_as_labels",
        check_loss,
        matters={"tau": 2.0, "all_reduce_rows": one_more},
        exempt={"on policy it is reinforce": "reads the sign of the advantage alone"},
    ),
    Record(
        "losses.flowrl",
        check_loss,
        call={"beta": 1.0},
        matters={"beta": 2.0, "w_max": 0.5, "all_reduce_rows": one_more},
        exempt={"on policy it is reinforce": "the target is a distribution", **GROWS, **DETACHED_WEIGHT},
    ),
    Record(
        "losses.online_dpo",
        check_loss,
        matters={"beta": 1.0, "all_reduce_rows": one_more},
        exempt=GROWS,
    ),
]


def column(*x: float) -> Tensor:
    """One token for each response."""
    return torch.tensor(x, dtype=torch.float64)[:, None]


def gradient(losses: Tensor, x: Tensor, ids: Tensor) -> list[float]:
    """Of the mean over groups, for each response."""
    mean = prompt_token_mean(losses, ids, torch.ones_like(x, dtype=torch.bool))
    return torch.autograd.grad(mean, x)[0].flatten().tolist()


ONE = torch.zeros(3, dtype=torch.int64)


def test_gvpo_by_hand() -> None:
    """R = 2, 0, 1 about its mean: 1, −1, 0. A about its mean: 0, 0, 0, whatever is added to it. 3/2 · ½ · 1."""
    x, m = column(2.0, 0.0, 1.0).requires_grad_(), torch.ones(3, 1, dtype=torch.bool)
    got = gvpo(x, torch.zeros(3, 1).double(), column(7.0, 7.0, 7.0), ONE, m, beta=1.0)
    assert got.flatten().tolist() == pytest.approx([0.75, 0.75, 0.0])
    # (R_i − mean R) / (G − 1), if the mean is a constant and if it is not
    assert torch.autograd.grad(seq_mean_token_mean(got, m) * 3, x)[0].flatten().tolist() == pytest.approx(
        [1.5, -1.5, 0]
    )


def test_gvpo_is_zero_at_the_policy_that_the_kl_asks_for() -> None:
    """log π = log π_old + A/β − log Z: whatever Z of the group."""
    old, a = torch.randn(5, 1).double(), torch.randn(5, 1).double()
    ids = torch.tensor([0, 1, 0, 1, 1])
    pi = old + a / 0.3 - column(*[(0.7, -2.0)[i] for i in ids.tolist()])
    got = gvpo(pi, old, a, ids, torch.ones(5, 1, dtype=torch.bool), beta=0.3)
    assert got.abs().max() < 1e-12


def test_gvpo_minimizes_the_kl_constrained_reward_by_enumeration() -> None:
    """A softmax over four responses, each sampled once: the minimum is old · e^(r/β) / Z, and nothing else is."""
    old, r, m = torch.randn(4).double().log_softmax(0), torch.randn(4).double(), torch.ones(4, 1, dtype=torch.bool)
    want = (old + r / 0.5).log_softmax(0)
    for x in (want, old, want + torch.tensor([0.1, 0, 0, 0])):
        logits = x.clone().requires_grad_()
        losses = gvpo(
            logits.log_softmax(0)[:, None], old[:, None], (r - r.mean())[:, None], ONE.new_zeros(4), m, beta=0.5
        )
        (g,) = torch.autograd.grad(losses.sum(), logits)
        assert (g.abs().max() < 1e-12) == (x is want)


def test_gvpo_of_the_authors_code() -> None:
    """Their loss of a micro-batch is Σ ½ (…)² / (n − 1): ours is that over its groups, of responses of any length."""
    m = torch.tensor([[True, True], [True, False], [True, True], [True, False]])
    x, old, a = (torch.randn(4, 2).double() for _ in range(3))
    ids = torch.tensor([0, 1, 0, 1])
    theirs = 0.0
    for rows in ([0, 2], [1, 3]):
        implicit = [0.1 * sum(float(x[i, t] - old[i, t]) for t in range(2) if m[i, t]) for i in rows]
        rewards = [float(a[i][m[i]].mean()) for i in rows]
        centred = [[v - sum(values) / 2 for v in values] for values in (implicit, rewards)]
        theirs += sum(0.5 * (c - b) ** 2 for c, b in zip(*centred, strict=True)) / (2 - 1)
    assert float(seq_mean_token_mean(gvpo(x, old, a, ids, m), m)) * 2 == pytest.approx(theirs)


def test_real_by_hand() -> None:
    """Two good with logits 1 and −1, one bad with 2: log(1 + e^−1 + e^1) + log(1 + e^2)."""
    x, m = column(0.5, -0.5, 1.0).requires_grad_(), torch.ones(3, 1, dtype=torch.bool)
    losses = rewards_as_labels(x, torch.zeros(3, 1).double(), column(3.0, 0.1, 0.0), ONE, m)
    want = math.log(1 + math.e + 1 / math.e) + math.log(1 + math.e**2)
    assert losses.flatten().tolist() == pytest.approx([want] * 3)
    plus = 1 + math.e + 1 / math.e
    weights = [-2 / math.e / plus, -2 * math.e / plus, 2 * math.e**2 / (1 + math.e**2)]
    assert gradient(losses, x, ONE) == pytest.approx(weights)


@pytest.mark.parametrize(("s", "good"), list(product((-3.0, -0.2, 0.0, 0.4, 5.0), (True, False))))
def test_a_response_weighs_less_the_better_it_does(s: float, good: bool) -> None:
    """The paper's |W| = 1 / (τ (1 + C e^(±s/τ))), at most 1/τ, with C of the others of its label."""
    tau, other, sign = 0.5, 0.3, 1.0 if good else -1.0
    x, m = column(s, other, 0.0).requires_grad_(), torch.ones(3, 1, dtype=torch.bool)
    losses = rewards_as_labels(x, torch.zeros(3, 1).double(), column(sign, sign, -sign), ONE, m, tau=tau)
    c = 1 + math.exp(-sign * other / tau)
    assert gradient(losses, x, ONE)[0] == pytest.approx(-sign / tau / (1 + c * math.exp(sign * s / tau)))


def test_real_of_a_group_that_agrees_is_zero() -> None:
    x, m = column(0.5, -0.5, 1.0, 2.0).requires_grad_(), torch.ones(4, 1, dtype=torch.bool)
    ids = torch.tensor([0, 0, 1, 1])
    losses = rewards_as_labels(x, torch.zeros(4, 1).double(), column(1.0, 1.0, 0.0, -1.0), ids, m)
    assert losses.flatten().tolist() == [0.0] * 4
    assert gradient(losses, x, ids) == [0.0] * 4


def test_real_of_ms_swift() -> None:
    """ms-swift takes a logsumexp with 0 of each label's logits, and divides by all groups."""
    m = torch.rand(8, 5) < 0.8
    m[:, 0] = True
    x, old = torch.randn(8, 5).double(), torch.randn(8, 5).double()
    a = torch.tensor([1.0, 1, 1, 1, -1, 1, -2, 1]).double()[:, None].expand(8, 5)  # the first group agrees
    ids = torch.arange(8) // 4
    s = torch.where(m, x - old, 0.0).sum(1) / m.sum(1) / 0.5
    bad = torch.logsumexp(torch.stack([s[4], s[6], torch.tensor(0.0)]), 0)
    good = torch.logsumexp(torch.stack([-s[5], -s[7], torch.tensor(0.0)]), 0)
    got = prompt_token_mean(rewards_as_labels(x, old, a, ids, m), ids, m)
    assert float(got) == pytest.approx(float(bad + good) / 2)


def test_flowrl_by_hand() -> None:
    """x = 1, −3 and w = 1, e: log Z is −(1 − 3e)/(1 + e), and the second gradient counts e times."""
    x, m = column(1.0, 2.0).requires_grad_(), torch.ones(2, 1, dtype=torch.bool)
    old, ref, ids = column(1.0, 1.0), column(0.0, 0.0), ONE[:2]
    losses = flowrl(x, old, ref, column(0.0, 2.5), ids, m, beta=2.0)
    w, z = [1.0, math.e], (3 * math.e - 1) / (1 + math.e)
    residuals = [z + 1, z - 3]
    assert losses.flatten().tolist() == pytest.approx([w[i] * residuals[i] ** 2 for i in range(2)])
    slopes = gradient(losses, x, ids)
    assert slopes == pytest.approx([w[i] * residuals[i] for i in range(2)])
    assert sum(slopes) == pytest.approx(0.0)  # the derivative with respect to log Z, at its minimum
    capped = flowrl(x, old, ref, column(0.0, 2.5), ids, m, beta=2.0, w_max=1.0)
    assert capped.flatten().tolist() == pytest.approx([4.0, 4.0])


def test_flowrl_has_the_heads_gradient_where_the_head_has_learned_the_group() -> None:
    """The authors' loss with log Z a number that gradient steps take to its minimum."""
    m = torch.tensor([[True, True], [True, False], [True, True]])
    x, ref, a = (torch.randn(3, 2).double() for _ in range(3))
    old = x + torch.rand(3, 2).double() / 2  # w from e^-1 to 1, so that 600 steps of 0.3 reach the minimum
    x.requires_grad_()
    lengths, log_z = m.sum(1), torch.zeros((), dtype=torch.float64, requires_grad=True)

    def theirs() -> Tensor:
        mean = [torch.where(m, v, 0.0).sum(1) / lengths for v in (x, ref, a)]
        w = torch.where(m, x - old, 0.0).sum(1).exp().detach().clamp(max=10)
        return (w * (log_z + mean[0] - 15 * mean[2] - mean[1]).square()).mean()

    for _ in range(600):
        (slope,) = torch.autograd.grad(theirs(), log_z)
        log_z = (log_z - 0.3 * slope).detach().requires_grad_()
    got = seq_mean_token_mean(flowrl(x, old, ref, a, ONE, m), m)
    assert float(got) == pytest.approx(float(theirs()))
    for mine, want in zip(torch.autograd.grad(got, x), torch.autograd.grad(theirs(), x), strict=True):
        torch.testing.assert_close(mine, want)


def test_online_dpo_by_hand() -> None:
    """The second of three is best and the first worst: −log σ(β (2 − 0.5 − (1 − 1))), and nothing for the third."""
    x, m = column(1.0, 2.0, 7.0).requires_grad_(), torch.ones(3, 1, dtype=torch.bool)
    losses = online_dpo(x, column(1.0, 0.5, 0.0), column(-1.0, 3.0, 0.0), ONE, m, beta=0.5)
    assert losses.flatten().tolist() == pytest.approx([math.log(1 + math.exp(-0.75))] * 3)
    slope = 0.5 / (1 + math.exp(0.75))
    assert gradient(losses, x, ONE) == pytest.approx([slope, -slope, 0.0])


def test_online_dpo_is_dpo_on_the_pairs_that_a_loop_finds() -> None:
    """Groups of two to five in any order, responses of one to six tokens, padded and packed."""
    ids = dense_ids([0, 1, 1, 2, 0, 3, 2, 3, 3, 1, 3, 3])
    m = torch.arange(6) < torch.randint(1, 7, (12, 1))
    x, ref, a = (torch.randn(12, 6).double() for _ in range(3))
    sums = [[float(v[i][m[i]].sum()) for i in range(12)] for v in (x, ref)]
    scores = [float(a[i][m[i]].mean()) for i in range(12)]
    pairs = []
    for g in range(4):
        rows = sorted((i for i in range(12) if ids[i] == g), key=lambda i: scores[i])
        pairs.append((rows[-1], rows[0]))
    theirs = dpo(*(torch.tensor([v[pair[k]] for pair in pairs]).double() for v in sums for k in (0, 1)), beta=0.3)
    got = prompt_token_mean(online_dpo(x, ref, a, ids, m, beta=0.3), ids, m)
    assert float(got) == pytest.approx(float(theirs.mean()))
    cu = torch.nn.functional.pad(m.sum(1).cumsum(0), (1, 0)).int()
    packed = online_dpo(x[m], ref[m], a[m], ids, torch.ones(int(m.sum()), dtype=torch.bool), cu, beta=0.3)
    torch.testing.assert_close(packed, online_dpo(x, ref, a, ids, m, beta=0.3)[m])


def test_online_dpo_without_a_pair_is_zero() -> None:
    """Equal advantages, and a group of one; among equal best responses the first is chosen."""
    x, z, m = column(0.3, 0.9, 0.5).requires_grad_(), column(0, 0, 0), torch.ones(3, 1, dtype=torch.bool)
    losses = online_dpo(x, z, z, torch.tensor([0, 0, 1]), m)
    assert losses.flatten().tolist() == [0.0] * 3
    assert gradient(losses, x, torch.tensor([0, 0, 1])) == [0.0] * 3
    slopes = gradient(online_dpo(x, z, column(1.0, 1.0, 0.0), ONE, m), x, ONE)
    assert slopes[0] < 0 == slopes[1] < slopes[2]
    slopes = gradient(online_dpo(x, z, column(0.0, 1.0, 0.0), ONE, m), x, ONE)  # and among equal worst ones
    assert slopes[1] < 0 == slopes[2] < slopes[0]


@pytest.mark.parametrize("loss", [gvpo, rewards_as_labels, online_dpo])
def test_a_row_without_tokens_is_in_no_group(loss) -> None:
    m = torch.tensor([[True], [True], [False]])
    x, old, a = column(0.3, -0.4, torch.nan), column(0, 0, 0), column(1.0, -1.0, torch.nan)
    got = loss(x, old, a, ONE, m)[:2]
    torch.testing.assert_close(got, loss(x[:2], old[:2], a[:2], ONE[:2], m[:2]))


@pytest.mark.parametrize(("loss", "option"), [(gvpo, "beta"), (rewards_as_labels, "tau"), (online_dpo, "beta")])
def test_group_losses_refuse_options_that_must_be_positive(loss, option: str) -> None:
    z, m = torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"{option}=0"):
        loss(z, z, z, ONE[:2], m, **{option: 0})
    with pytest.raises(ValueError, match="w_max=0"):
        flowrl(z, z, z, z, ONE[:2], m, w_max=0)


IN_GROUPS = [algorithms.gvpo(), algorithms.real(), algorithms.flowrl(), algorithms.online_dpo()]


def step(groups: int = 4) -> dict[str, Tensor]:
    """Three responses to each prompt, of up to six tokens."""
    rows = 3 * groups
    data = {name: torch.randn(rows, 6).double() for name in ("log_probs", "old_log_probs", "ref_log_probs")}
    mask = torch.arange(6) < torch.randint(1, 7, (rows, 1))
    data |= {"advantages": torch.randn(rows, 1).double().expand(rows, 6), "response_mask": mask}
    return {**data, "group_ids": torch.arange(rows) % groups}


@pytest.mark.parametrize("algorithm", IN_GROUPS, ids=lambda algorithm: algorithm.name)
def test_micro_batches_of_whole_groups_are_the_step(algorithm: Algorithm) -> None:
    data = step()
    data["log_probs"].requires_grad_()
    whole = algorithms.policy_objective(algorithm, data)
    (want,) = torch.autograd.grad(whole, data["log_probs"])
    counts = algorithms.step_counts(algorithm, data)
    total, got = 0.0, torch.zeros_like(want)
    for ids in ([0, 3], [1], [2]):
        rows = torch.isin(data["group_ids"], torch.tensor(ids))
        part = {name: x[rows] for name, x in {**data, **counts.columns}.items()} | counts.totals
        part |= {"log_probs": data["log_probs"].detach()[rows].requires_grad_()}
        part |= {"group_ids": dense_ids(part["group_ids"])}
        loss = algorithms.policy_objective(algorithm, part)
        (got[rows],) = torch.autograd.grad(loss, part["log_probs"])
        total += float(loss)
    assert total == pytest.approx(float(whole), rel=1e-12)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", IN_GROUPS, ids=lambda algorithm: algorithm.name)
def test_a_split_group_is_refused(algorithm: Algorithm) -> None:
    data = step()
    counts = algorithms.step_counts(algorithm, data)
    part = {name: x[:7] for name, x in {**data, **counts.columns}.items()} | counts.totals
    with pytest.raises(ValueError, match=r"the group of row 0 has \d+ of the step's \d+ tokens here"):
        algorithms.policy_objective(algorithm, part)
    assert algorithm.together == "group_ids"


def test_ranks_without_a_group_get_a_row_without_tokens() -> None:
    """A row that fills a rank is in a group of its own, and no group's numbers change."""
    data = step(groups=1)
    empty = {name: torch.cat([x, x[:1]]) for name, x in data.items()}
    empty["response_mask"] = torch.cat([data["response_mask"], torch.zeros(1, 6, dtype=torch.bool)])
    for algorithm in IN_GROUPS:
        want = algorithms.policy_objective(algorithm, data)
        torch.testing.assert_close(algorithms.policy_objective(algorithm, empty), want)
        empty["group_ids"][-1] = 1
        torch.testing.assert_close(algorithms.policy_objective(algorithm, empty), want)
