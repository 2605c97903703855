"""Of the response's tokens log-probs and entropies, and the objective: from logits, or from the head in tiles."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from rlprims.algorithms import Algorithm, policy_losses
from rlprims.execution.hf import _head
from rlprims.execution.hf._head import Head, head_of, headless
from rlprims.execution.hf._models import response_logits
from rlprims.execution.hf._packed import layout, packed_logits, packs
from rlprims.logprobs import entropy_from_logits, from_hidden, from_logits, fused_loss


def token_scores(
    model: nn.Module,
    part: dict[str, Tensor],
    *,
    temperature: float,
    wanted: Collection[str],
    entropy_gradient: bool = False,
) -> dict[str, Tensor]:
    """``log_probs`` and ``entropies``, (B, T), those that are wanted."""
    head = head_of(model)
    if head is not None and len(head.weight) >= _head.LARGE_VOCABULARY:
        states, attended = _states(model, part)
        ids = part["responses"][attended]
        both = from_hidden(states, head.weight, ids, temperature=temperature, soft_cap=head.soft_cap)
        found = {name: x for name, x in both._asdict().items() if name in wanted}
        if "entropies" in found and not entropy_gradient:
            found["entropies"] = found["entropies"].detach()
    else:
        logits, attended = _logits(model, part)
        found = {}
        if "log_probs" in wanted:
            found["log_probs"] = from_logits(logits, part["responses"][attended], temperature=temperature)
        if "entropies" in wanted:
            with torch.set_grad_enabled(entropy_gradient):
                found["entropies"] = entropy_from_logits(logits, temperature=temperature)
    return {name: _placed(x, attended) for name, x in found.items()}


def fused_objective(
    model: nn.Module,
    head: Head,
    part: dict[str, Tensor],
    algorithm: Algorithm,
    weights: Tensor,
    *,
    temperature: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, of token-wise losses and what each token's counts, and with it what :func:`token_scores` gives."""
    states, attended = _states(model, part)
    columns = {name: x[attended] for name, x in part.items() if isinstance(x, Tensor) and x.shape == attended.shape}
    ids, mask = columns.pop("responses"), columns.pop("response_mask")

    def losses(**data: Tensor) -> Tensor:
        return policy_losses(algorithm, data)

    loss, log_probs, entropies = fused_loss(
        states,
        head.weight,
        ids,
        weights[attended],
        mask,
        losses,
        columns,
        temperature=temperature,
        soft_cap=head.soft_cap,
    )
    return loss, {"log_probs": _placed(log_probs, attended), "entropies": _placed(entropies, attended)}


def _states(model: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(M, H), the last hidden states, where :func:`_logits` has logits."""
    with headless(model):
        return _logits(model, part)


def _logits(model: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(M, V), of the M response tokens that are attended, and where in (B, T) they are."""
    if packs(model):
        where = layout(part)
        return packed_logits(model, where), where.attended
    attended = part["attention_mask"][:, part["prompts"].shape[1] :].bool()
    return response_logits(model, part)[attended], attended


def _placed(x: Tensor, attended: Tensor) -> Tensor:
    """(M,) to (B, T)."""
    return x.new_zeros(attended.shape).masked_scatter(attended, x)
