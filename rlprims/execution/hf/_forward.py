"""Forward passes over prompts with responses: log-probs, entropies, the policy's objective, and a critic's values.

With ``fused_head`` the logits of a micro-batch are never held as a whole: the LM head is applied to the last hidden
states of a few tokens at a time, by :mod:`rlprims.logprobs`. That is declared, and checked before training begins: the
model's type must be one of :data:`FUSED_HEAD_MODELS`, and the objective a weighted sum of token-wise losses.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlprims.algorithms import Algorithm, policy_losses
from rlprims.execution.hf._packed import layout, packed_inputs
from rlprims.logprobs import entropy_from_logits, from_hidden, from_logits, fused_loss
from rlprims.types import Kept, token_wise

FUSED_HEAD_MODELS = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Values of ``model_type`` whose logits are the last hidden states times the head's weight, perhaps with a soft cap."""

_SCALES = ("logit_scale", "logits_scaling")
"""Where a config has a factor of the logits: Cohere and Granite."""


class Head(NamedTuple):
    """The LM head: logits = hidden @ weightᵀ, and then soft_cap · tanh(logits / soft_cap) if there is a soft cap."""

    weight: Tensor
    soft_cap: float | None


def head_of(model: nn.Module) -> Head:
    """The head of a model that :func:`check_fused_head` accepts."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    return Head(weight, getattr(config, "final_logit_softcapping", None))


def check_fused_head(model: nn.Module) -> None:
    """Refuse a model whose logits are made of more than :class:`Head` has.

    Raises:
        ValueError: the head has a bias, the logits are scaled, or the model's type is not among those that are tested.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    scales = [name for name in _SCALES if getattr(config, name, None) not in (None, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:  # type: ignore[operator]
        reason = "its LM head has a bias"
    elif scales:
        reason = f"it scales its logits by {scales[0]}"
    elif config.model_type not in FUSED_HEAD_MODELS:
        reason = f"tested types are {', '.join(FUSED_HEAD_MODELS)}"
    else:
        return
    raise ValueError(
        f"model.fused_head: expected logits = hidden states x weight, got a {config.model_type}: {reason}. "
        "Set model.fused_head: false"
    )


def check_fused_objective(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose objective is not a weighted sum of losses that each depend on one token.

    Raises:
        ValueError: a loss is not declared token-wise or reads entropies, or the aggregation is not declared linear.
    """
    found = [algorithm.policy_loss, *(term.loss for term in algorithm.loss_terms)]
    if not algorithm.token_wise:
        raise ValueError(
            "model.fused_head: expected losses that are declared by rlprims.types.token_wise and do not read "
            f"entropies, got {', '.join(loss.path for loss in found)}. Set model.fused_head: false"
        )
    aggregation = algorithm.aggregation
    if not (aggregation.path.startswith("rlprims.losses.") or getattr(aggregation.fn, "linear", False)):
        raise ValueError(
            f"model.fused_head: expected an aggregation that is linear in the losses, got {aggregation.path}. If it is "
            f"(rlprims.testing.check_aggregation tests it), declare {aggregation.fn.__name__}.linear = True; else set "
            "model.fused_head: false"
        )


def token_weights(algorithm: Algorithm, data: Mapping[str, Tensor]) -> Tensor:
    """(B, T): the weight of each token's loss in the objective, which is the gradient of a linear aggregation."""
    zero = torch.zeros(data["response_mask"].shape, device=data["response_mask"].device, requires_grad=True)
    (weights,) = torch.autograd.grad(algorithm.aggregation({**data, "losses": zero}), zero)
    return weights


def token_scores(
    model: nn.Module,
    batch: dict[str, Tensor],
    *,
    temperature: float,
    wanted: Collection[str],
    packing: bool,
    fused_head: bool,
    entropy_gradient: bool = False,
) -> dict[str, Tensor]:
    """``log_probs`` and ``entropies``, (B, T), those that are wanted: within the kept sets if the batch has them.

    Also ``whole_log_probs``, of the whole vocabulary and without gradient, unless the head is fused.
    """
    output, attended = _before_responses(model, batch, packing=packing, hidden=fused_head)
    ids, kept, found = batch["responses"][attended], _kept_of(batch, attended), dict[str, Tensor]()
    if fused_head:
        head = head_of(model)
        both = from_hidden(output, head.weight, ids, kept, temperature=temperature, soft_cap=head.soft_cap)
        found = {name: x for name, x in both._asdict().items() if name in wanted}
    else:
        if "log_probs" in wanted:
            found["log_probs"] = from_logits(output, ids, kept, temperature=temperature)
        if "entropies" in wanted:
            with torch.set_grad_enabled(entropy_gradient):
                found["entropies"] = entropy_from_logits(output, kept, temperature=temperature)
        if "whole_log_probs" in wanted:
            found["whole_log_probs"] = from_logits(output.detach(), ids, temperature=temperature)
    return {name: _to_rows(x, attended) for name, x in found.items()}


def fused_objective(
    model: nn.Module, batch: dict[str, Tensor], algorithm: Algorithm, *, temperature: float, packing: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's objective, computed with the head a few tokens at a time, and what :func:`token_scores` gives."""
    head = head_of(model)
    hidden, attended = _before_responses(model, batch, packing=packing, hidden=True)
    tokens = {name: x[attended] for name, x in batch.items() if isinstance(x, Tensor) and x.shape == attended.shape}
    ids, mask = tokens.pop("responses"), tokens.pop("response_mask")
    weights = token_weights(algorithm, batch)[attended]

    @token_wise
    def losses(**data: Tensor) -> Tensor:
        return policy_losses(algorithm, data)

    loss, log_probs, entropies = fused_loss(
        hidden,
        head.weight,
        ids,
        weights,
        mask,
        losses,
        tokens,
        _kept_of(batch, attended),
        temperature=temperature,
        soft_cap=head.soft_cap,
    )
    return loss, {"log_probs": _to_rows(log_probs, attended), "entropies": _to_rows(entropies, attended)}


def response_values(critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B, T): the value of the state in which each response token was sampled."""
    columns = _columns_before_responses(batch)
    values: Tensor = critic(**_padded_inputs(batch), use_cache=False).logits
    return values[:, columns, 0]


def _before_responses(
    model: nn.Module, batch: dict[str, Tensor], *, packing: bool, hidden: bool
) -> tuple[Tensor, Tensor]:
    """Logits (M, V) or last hidden states (M, H) at the token before each of the M attended response tokens.

    Also ``attended``, bool (B, T), which says where these M tokens are. Only these tokens meet the head.
    """
    if packing:
        where = layout(batch)
        inputs, columns, attended = packed_inputs(where), where.predicting, where.attended
    else:
        inputs, columns = _padded_inputs(batch), _columns_before_responses(batch)
        attended = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
    output: Tensor
    if hidden:
        output = model.base_model(**inputs, use_cache=False).last_hidden_state[:, columns]  # type: ignore[operator]
    else:
        output = model(**inputs, use_cache=False, logits_to_keep=columns).logits
    return (output[0] if packing else output[attended]), attended


def _padded_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    attention = batch["attention_mask"].long()
    return {
        "input_ids": torch.cat([batch["prompts"], batch["responses"]], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }


def _columns_before_responses(batch: dict[str, Tensor]) -> Tensor:
    """(T,): of the padded rows, the column before each response token."""
    prompts, responses = batch["prompts"], batch["responses"]
    return torch.arange(responses.shape[1], device=responses.device) + prompts.shape[1] - 1


def _kept_of(batch: dict[str, Tensor], attended: Tensor) -> Kept | None:
    """The kept sets of the attended response tokens."""
    kept: Kept | None = batch.get("kept")  # type: ignore[assignment]
    return None if kept is None else kept.take(attended.flatten().nonzero()[:, 0])


def _to_rows(x: Tensor, attended: Tensor) -> Tensor:
    """(M,) to (B, T), 0 elsewhere."""
    return x.new_zeros(attended.shape).masked_scatter(attended, x)


def trimmed(batch: dict[str, Tensor], rows: Iterable[int], kept: Kept | None = None) -> dict[str, Tensor]:
    """Some rows without the columns that are padding in all of them; of the batch's kept sets theirs, as ``kept``."""
    index = torch.tensor(list(rows), device=batch["responses"].device)
    part = {name: tensor[index] for name, tensor in batch.items()}
    width = part["prompts"].shape[1]
    attention = part["attention_mask"]
    prompt = int(attention[:, :width].sum(-1).max())
    response = max(1, int(attention[:, width:].sum(-1).max()))
    columns = {"prompts": slice(width - prompt, None), "attention_mask": slice(width - prompt, width + response)}
    found = {
        name: tensor[:, columns.get(name, slice(response))] if tensor.dim() == 2 else tensor
        for name, tensor in part.items()
    }
    if kept is None:
        return found
    tokens = index.cpu()[:, None] * batch["responses"].shape[1] + torch.arange(response)
    ids, offsets = kept.take(tokens.flatten())
    return {**found, "kept": Kept(ids.to(index.device), offsets.to(index.device))}  # type: ignore[dict-item]
