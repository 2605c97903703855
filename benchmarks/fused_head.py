"""The LM head with what follows it: log-prob and entropy of each token, and a clipped policy loss with its gradient.

A quarter of the tokens is masked, as in a batch of ragged responses. The peers score them all and mask the loss; torch
alone is timed both ways. The products that no one can avoid (one forward; two more for the gradient), of the valid
tokens in the dtype given, are timed as "products": the least time. They compute nothing to be wrong about. ``rlprims,
formulas`` is the same call without kernels, which holds all logits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import Case, Function, by_formulas, largest_error
from benchmarks._peers import peer
from rlprims import losses
from rlprims.logprobs import from_hidden, fused_loss
from rlprims.types import token_wise

SIZES = ((1024, 512, 32_768), (256, 512, 151_936))
QUICK_SIZES = ((256, 128, 16_384),)
LIGER_CHUNK = 256  # rows; its default of one sequence is meant for long ones
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Tokens(NamedTuple):
    hidden: Tensor
    head: Tensor
    token_ids: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


def cases(quick: bool) -> Iterator[Case]:
    for size in QUICK_SIZES if quick else SIZES:
        for dtype in NAMES:
            tokens = _tokens(*size, dtype)
            yield _scoring(tokens)
            yield _training(tokens)


def _tokens(count: int, width: int, vocabulary: int, dtype: torch.dtype) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=generator).to(dtype).requires_grad_()
    head = (3 * width**-0.5 * torch.randn(vocabulary, width, generator=generator)).to(dtype).requires_grad_()
    token_ids = torch.randint(vocabulary, (count,), generator=generator)
    with torch.no_grad():
        log_probs = _plain(hidden.double(), head.double(), token_ids)[0]
    # Far inside the clip, so that an error of the result is one of the head.
    old = (log_probs + 0.2 * torch.rand(count, generator=generator) - 0.1).float()
    advantages = torch.randn(count, generator=generator)
    return Tokens(hidden, head, token_ids, old, advantages, torch.arange(count) % 4 > 0)


def _name(tokens: Tokens, what: str) -> str:
    return f"{len(tokens.hidden)}x{len(tokens.head)} {NAMES[tokens.hidden.dtype]} {what}"


def _scoring(tokens: Tokens) -> Case:
    hidden, head, token_ids = (x.detach() for x in tokens[:3])
    want = _plain(hidden.double(), head.double(), token_ids)
    peers: dict[str, Function] = {"torch": lambda: _plain(hidden, head, token_ids)}
    peers |= {who: partial(of, hidden, head, token_ids) for who, of in _peers().items()}
    if (liger := peer("liger_kernel.chunked_loss.fused_linear_ppo")) is not None:
        score = liger.LigerFusedLinearPPOBase.chunk_forward
        peers["liger, no entropy"] = lambda: (score(hidden[None], head, token_ids[None])[0],)
    return Case(
        family="head",
        name=_name(tokens, "score"),
        ours=lambda: from_hidden(hidden, head, token_ids),
        peers=peers
        | {
            "rlprims, formulas": by_formulas(lambda: from_hidden(hidden, head, token_ids)),
            "products": lambda: _nothing(hidden @ head.T),
        },
        error=lambda got: largest_error(got, want[: len(got)]) if got else 0.0,
    )


def _training(tokens: Tokens) -> Case:
    exact = tokens._replace(**{n: getattr(tokens, n).detach().double().requires_grad_() for n in ("hidden", "head")})
    want = [x.detach().double() for x in _two_steps(exact, _plain)]
    peers: dict[str, Function] = {
        "torch": partial(_two_steps, tokens, _plain),
        "torch, valid only": partial(_two_steps, tokens, _plain, valid_only=True),
        "rlprims, formulas": by_formulas(partial(_fused, tokens)),
        "rlprims, two steps": partial(_two_steps, tokens, lambda *of: tuple(from_hidden(*of)), valid_only=True),
    }
    peers |= {who: partial(_two_steps, tokens, of) for who, of in _peers().items()}
    if (liger := _liger(tokens)) is not None:
        peers["liger"] = liger
    return Case(
        family="head",
        name=_name(tokens, "train"),
        ours=partial(_fused, tokens),
        peers=peers | {"products": partial(_products, tokens)},
        error=lambda got: largest_error(got, want) if got else 0.0,
    )


def _fused(tokens: Tokens) -> tuple[Tensor, ...]:
    data = {"old_log_probs": tokens.old_log_probs, "advantages": tokens.advantages}
    weights = tokens.mask / tokens.mask.sum()
    loss, *_ = fused_loss(*tokens[:3], weights, tokens.mask, token_wise(losses.clipped_surrogate), data)
    return loss, *torch.autograd.grad(loss, tokens[:2])


def _two_steps(tokens: Tokens, of: LogProbs, valid_only: bool = False) -> tuple[Tensor, ...]:
    hidden, head, token_ids, old, advantages, mask = tokens
    if valid_only:
        hidden, token_ids, old, advantages, mask = (x[mask] for x in (hidden, token_ids, old, advantages, mask))
    log_probs, _ = of(hidden, head, token_ids)
    per_token = losses.clipped_surrogate(log_probs[None], old[None], advantages[None], mask[None])
    loss = losses.token_mean(per_token, mask[None])
    return loss, *torch.autograd.grad(loss, tokens[:2])


def _liger(tokens: Tokens) -> Function | None:
    """What of Liger runs on a CPU: its loss by chunks, in plain torch. A row is one token: advantages are per row."""
    module = peer("liger_kernel.chunked_loss")
    if module is None:
        return None
    loss_of = module.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=LIGER_CHUNK, loss_type="bnpo"
    )
    mask = tokens.mask[:, None].float()

    def run() -> tuple[Tensor, ...]:
        hidden, head, token_ids, old, advantages, _ = tokens
        loss, _ = loss_of(hidden[:, None], head, token_ids[:, None], mask, advantages, old_per_token_logps=old[:, None])
        return loss, *torch.autograd.grad(loss, tokens[:2])

    return run


def _plain(hidden: Tensor, head: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 after the product, as careful code does it; the entropy without gradient, for it is logged only."""
    logits = hidden @ head.T
    log_p = (logits if logits.dtype is torch.float64 else logits.float()).log_softmax(-1)
    entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(1, token_ids[:, None])[:, 0], entropies


def _products(tokens: Tokens) -> tuple[()]:
    hidden, head = tokens.hidden.detach()[tokens.mask], tokens.head.detach()
    logits = hidden @ head.T
    return _nothing(logits @ head, logits.T @ hidden)


def _nothing(*_: Tensor) -> tuple[()]:
    return ()


def _peers() -> dict[str, LogProbs]:
    found: dict[str, LogProbs] = {}
    if (of_verl := peer("verl.utils.experimental.torch_functional")) is not None:
        found["verl"] = of_verl.FusedLinearForPPO()
    kernels, utils = peer("trl.kernels"), peer("trl.trainer.utils")
    if kernels is not None and utils is not None:
        width = utils._CHUNKED_LOGPROB_CHUNK_SIZE

        def of_trl(hidden: Tensor, head: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
            apply = kernels.ChunkedLogProbFunction.apply
            log_probs, entropies, *_ = apply(hidden, head, None, token_ids, 1.0, width, None, 1.0, ("entropy",))
            return log_probs, entropies

        found["trl"] = of_trl
    return found
