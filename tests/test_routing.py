"""Replayed routes: the gates of the experts that the sampler used, from the trainer's router."""

import pytest
import torch
from torch import Tensor

from rlprims.routing import align, replay


def logits_of(tokens: int, experts: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, experts, generator=generator, dtype=dtype).requires_grad_()


def test_replaying_a_real_routers_own_routes_changes_nothing() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    torch.manual_seed(0)
    router = MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2))
    torch.nn.init.normal_(router.weight)
    logits, gates, experts = router(torch.randn(32, 16))
    replayed = replay(logits, experts)
    torch.testing.assert_close(replayed.gather(-1, experts), gates)
    torch.testing.assert_close(replayed.sum(-1), torch.ones(32))
    torch.testing.assert_close(replay(logits, torch.full_like(experts, -1)), replayed)


def test_by_hand() -> None:
    """e^0 = 1 and e^ln 3 = 3 of the recorded, 4 of the third: 1/4 and 3/4 of the two; 1/8 and 3/8 of all."""
    logits, experts = torch.tensor([[0.0, 3.0, 4.0]]), torch.tensor([[1, 0]])
    logits[0, 1:] = logits[0, 1:].log()
    torch.testing.assert_close(replay(logits, experts), torch.tensor([[0.25, 0.75, 0.0]]))
    torch.testing.assert_close(replay(logits, experts, renormalize=False), torch.tensor([[0.125, 0.375, 0.0]]))


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_gradient_is_that_of_the_softmax_over_the_recorded_experts(renormalize: bool) -> None:
    logits = logits_of(5, 6)
    experts = torch.tensor([[0, 5], [2, 1], [3, 4], [-1, -1], [1, 0]])
    assert torch.autograd.gradcheck(lambda x: replay(x, experts, renormalize=renormalize), logits)
    assert torch.autograd.gradgradcheck(lambda x: replay(x, experts, renormalize=renormalize), logits)
    (gradient,) = torch.autograd.grad(replay(logits, experts)[0, 0], logits)
    p = logits[0, [0, 5]].softmax(-1)
    torch.testing.assert_close(gradient[0, 0], p[0] * p[1])  # d softmax_i / d s_i = p (1 − p)
    torch.testing.assert_close(gradient[0, 5], -p[0] * p[1])
    assert gradient[0, 1:5].eq(0).all()


def test_an_expert_outside_the_trainers_own_choice_has_a_gradient() -> None:
    """Gathered from probabilities after the trainer's top-k it would be exactly 0: the bug of ISEEKYAN's PR#79."""
    logits = torch.tensor([[5.0, 4.0, -1.0, 0.0]], requires_grad=True)
    gates = replay(logits, torch.tensor([[2, 0]]))
    after_own_choice = torch.zeros(1, 4).scatter(-1, logits.topk(2).indices, 1.0) * gates.detach()
    assert after_own_choice[0, 2] == 0
    assert gates[0, 2] > 0
    (gradient,) = torch.autograd.grad(gates[0, 2], logits)
    assert gradient[0, 2] > 0


@pytest.mark.parametrize("rows", [3, 4])
def test_the_last_token_was_never_routed(rows: int) -> None:
    """Engines give n − 1 rows or n (verl PR#7075, slime): both become n, and the last of n − 1 is unknown."""
    routes = torch.arange(rows * 4).reshape(rows, 2, 2)
    aligned = align(routes, tokens=4)
    assert torch.equal(aligned[:rows], routes)
    assert (aligned[rows:] == -1).all()
    assert aligned.shape == (4, 2, 2)


def test_wrong_routes_say_what_is_wrong() -> None:
    logits = logits_of(2, 4)
    with pytest.raises(ValueError, match=r"has 2 rows, expected 3 or 4 for 4 tokens"):
        align(torch.zeros(2, 1, dtype=torch.int64), tokens=4)
    with pytest.raises(ValueError, match=r"of token 1 is \[0, 0\], expected different experts: fill padding with -1"):
        replay(logits, torch.tensor([[0, 1], [0, 0]]))  # padding of zeros (NeMo-RL PR#3208)
    with pytest.raises(ValueError, match=r"of token 0 is \[4, 1\], expected experts in \[0, 4\)"):
        replay(logits, torch.tensor([[4, 1], [0, 1]]))
    with pytest.raises(ValueError, match=r"of token 0 is \[-1, 1\], expected either no -1 or only -1 in a row"):
        replay(logits, torch.tensor([[-1, 1], [0, 1]]))
    with pytest.raises(ValueError, match=r"expected \(N, K\), K of E experts"):
        replay(logits, torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"router_logits has shape \(2, 4\) and dtype torch.int64, expected floats"):
        replay(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"dtype torch.float32, expected integers"):
        replay(logits, torch.zeros(2, 1))


def test_transforms_and_narrow_dtypes() -> None:
    experts = torch.tensor([[0, 5], [2, 1], [-1, -1]])
    logits = logits_of(3, 6, torch.float32)
    want = replay(logits, experts)
    torch.testing.assert_close(torch.compile(replay, backend="aot_eager", fullgraph=True)(logits, experts), want)
    torch.testing.assert_close(replay(logits.bfloat16(), experts.to(torch.int8)), want, atol=0.02, rtol=0)
    many = torch.stack([logits, 2 * logits]).detach()
    batched = torch.vmap(replay, (0, None))(many, experts)
    torch.testing.assert_close(batched[1], replay(many[1], experts))
