"""``examples/torchrl_loss.py``: torchrl's losses and ours, on its own policy of a tiny model, from one tensordict."""

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens
from torchrl.objectives import LossModule
from torchrl.objectives.llm import GRPOLoss

from examples.torchrl_loss import grpo_loss
from rlprims import algorithms, losses
from rlprims.algorithms import LossTerm, use
from tests import tiny

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

ROWS, PROMPT, LENGTH = 6, 3, 8
DAPO = algorithms.dapo(dialect="trl-1.16")


@pytest.fixture(scope="module")
def policy():
    options = {"input_mode": "tokens", "generate": False, "return_log_probs": True, "pad_output": True}
    return TransformersWrapper(tiny.causal_lm(), tokenizer=tiny.tokenizer(), **options)


@pytest.fixture(scope="module")
def batch(policy):
    """Left-padded prompts, responses cut at different lengths, and a sampler from which the policy has moved."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 32, (ROWS, PROMPT + LENGTH), generator=generator)
    place = torch.arange(PROMPT + LENGTH)
    attended = (place >= torch.tensor([0, 1, 2, 0, 0, 1])[:, None]) & (
        place < PROMPT + torch.tensor([8, 8, 5, 3, 8, 1])[:, None]
    )
    td = TensorDict(
        {
            "tokens": Tokens(full=ids, prompt=ids[:, :PROMPT], batch_size=[ROWS]),
            "masks": Masks(all_attention_mask=attended, batch_size=[ROWS]),
            "advantage": torch.randn(ROWS, 1, 1, generator=generator).expand(ROWS, PROMPT + LENGTH, 1).clone(),
        },
        batch_size=[ROWS],
    )
    with torch.no_grad():
        now, _, _ = GRPOLoss(policy, entropy_bonus=False)._get_cur_log_prob(td)
    drift = torch.randn(2, *now.shape, generator=generator) * 0.3
    td["log_probs"] = LogProbs(full=now + drift[0], batch_size=[ROWS])
    td["next", "ref_log_probs"] = LogProbs(full=now + drift[1], batch_size=[ROWS])
    return td


def value_and_gradient(loss, batch):
    loss.zero_grad()
    output = loss(batch)
    total = sum(value for key, value in output.items() if key.startswith("loss_"))
    total.backward()
    return total.detach().squeeze(), torch.cat([p.grad.flatten() for p in loss.actor_network.parameters()]), output


EXPLORING = algorithms.grpo(kl_coef=0.0).replace(
    aggregation=losses.token_mean, loss_terms=(LossTerm(coefficient=0.01, loss=use(losses.negative_entropy)),)
)
MATCHES = {
    "its defaults": (EXPLORING, {}, 0.2),
    "no entropy bonus": (EXPLORING.replace(loss_terms=()), {"entropy_bonus": False}, 0.2),
    "wider": (
        EXPLORING.replace(loss_terms=(), policy_loss={"clip_low": 0.3, "clip_high": 0.3}),
        {"entropy_bonus": False},
        0.3,
    ),
}


def theirs_with(policy, clip, **settings):
    """The bounds are set in the buffers: torchrl 0.10 does not read ``clip_epsilon``."""
    loss = GRPOLoss(policy, **settings)
    for name, buffer in loss.named_buffers():
        if name.startswith("clip_epsilon"):
            buffer.fill_(clip)
    return loss


@pytest.mark.parametrize("name", MATCHES)
def test_the_same_loss_and_gradient_as_torchrls(policy, batch, name):
    algorithm, settings, clip = MATCHES[name]
    theirs, their_gradient, their_output = value_and_gradient(theirs_with(policy, clip, **settings), batch)
    ours, our_gradient, our_output = value_and_gradient(grpo_loss(algorithm)(policy), batch)
    assert theirs.abs() > 1e-2
    assert their_gradient.norm() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_output.ESS, their_output.ESS, rtol=1e-4, atol=0)


def test_another_algorithm_is_one_line(policy, batch):
    """The numbers are those of the primitives, called with what the tensordict has."""
    module = GRPOLoss(policy, entropy_bonus=False)
    now, dist, _ = module._get_cur_log_prob(batch)
    old, a = batch["log_probs", "full"], batch["advantage"].squeeze(-1)
    want = {
        "gspo": losses.seq_mean_token_mean(losses.gspo(now, old, a, dist.mask), dist.mask),
        "cispo": losses.token_mean(losses.cispo(now, old, a, dist.mask), dist.mask),
        "ppo": losses.token_mean(losses.clipped_surrogate(now, old, a, dist.mask), dist.mask),
        "remax": losses.seq_mean_token_sum(losses.reinforce(now, a, dist.mask), dist.mask),
    }
    got = {name: grpo_loss(algorithms.PRESETS[name]())(policy)(batch).loss_objective for name in want}
    torch.testing.assert_close(got, want)
    assert abs(got["gspo"] - got["cispo"]) > 1e-2


def test_a_reference_is_read_where_torchrl_has_it(policy, batch):
    with_kl = grpo_loss(algorithms.grpo(kl_coef=0.1))(policy)
    plain = grpo_loss(algorithms.grpo(kl_coef=0.0))(policy)
    now, dist, _ = plain._get_cur_log_prob(batch)
    kl = losses.kl(now, batch["next", "ref_log_probs", "full"], dist.mask)
    want = plain(batch).loss_objective + 0.1 * losses.seq_mean_token_mean(kl, dist.mask)
    torch.testing.assert_close(with_kl(batch).loss_objective, want)
    with_kl.set_keys(ref_log_probs=("log_probs", "full"))
    assert with_kl(batch).loss_objective != want


def test_grpo_loss_is_a_loss_module_that_trains(policy, batch):
    loss = grpo_loss(DAPO)(policy)
    assert isinstance(loss, LossModule)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)
    before = [p.detach().clone() for p in policy.parameters()]
    seen = []
    for _ in range(4):
        output = loss(batch)
        output.loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(output.loss_objective.item())
    with torch.no_grad():
        for p, was in zip(policy.parameters(), before, strict=True):
            p.copy_(was)
    assert seen[-1] < seen[0]


def test_advantages_where_groups_are_whole(policy, batch):
    """As docs/interop.md does it."""
    rloo = algorithms.rloo(dialect="trl-1.16")
    mask = batch["masks", "all_attention_mask"].clone()
    mask[:, :PROMPT] = False
    scores = {"shaped_scores": torch.tensor([1.0, 0, 0, 1, 1, 1]), "group_ids": torch.arange(ROWS) // 3}
    scored = batch.copy()
    scored["advantage"] = algorithms.estimate_advantages(rloo, {**scores, "response_mask": mask})["advantages"][
        ..., None
    ]
    torch.testing.assert_close(scored["advantage"][:, PROMPT, 0], torch.tensor([1.0, -0.5, -0.5, 0, 0, 0]))
    assert grpo_loss(rloo)(policy)(scored).loss_objective.isfinite()


def test_padding_that_is_nan_is_not_read(policy, batch):
    marked = batch.clone()
    marked["log_probs", "full"][:, :PROMPT] = math.nan
    loss = grpo_loss(DAPO)(policy)
    torch.testing.assert_close(loss(marked).loss_objective, loss(batch).loss_objective)


def test_groups_in_the_loss_are_refused():
    with pytest.raises(ValueError, match="torchrl does not have group_ids for the loss of dapo"):
        grpo_loss(DAPO.replace(aggregation=losses.prompt_token_mean))


def test_a_missing_key_is_named(policy, batch):
    with pytest.raises(ValueError, match="the tensordict has no advantage; it has"):
        grpo_loss(DAPO)(policy)(batch.exclude("advantage"))
