"""The block of docs/interop.md in Liger's own fused function, whose gradients do not go through autograd."""

import pytest
import torch
from liger_kernel.chunked_loss import grpo_loss

from rlprims import losses
from tests.interop.test_hooks import given

pytestmark = pytest.mark.peers


def test_micro_batches_in_chunks_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_loss, "LigerFusedLinearGRPOFunction", grpo_loss.LigerFusedLinearGRPOFunction)
    given("Liger")
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=draw, requires_grad=True) for shape in ((4, 5, 8), (11, 8)))
    token_ids, mask = torch.randint(0, 11, (4, 5), generator=draw), torch.rand(4, 5, generator=draw) > 0.3
    advantages, old = torch.tensor([1.0, -1.0, 0.5, 2.0]), torch.randn(4, 5, generator=draw) - 2
    log_probs = (hidden @ weight.T).log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
    step = losses.token_mean(losses.cispo(log_probs, old, advantages[:, None].expand(4, 5), mask), mask)
    expected = torch.autograd.grad(step, (hidden, weight))

    fused = grpo_loss.LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)
    parts = [
        fused(
            hidden[i], weight, token_ids[i], mask[i], advantages[i],
            old_per_token_logps=old[i], num_items_in_batch=int(mask.sum()),
        )[0]
        for i in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), step)
    for found, right in zip(torch.autograd.grad(sum(parts), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(found, right)
