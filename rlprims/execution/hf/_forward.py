"""Forward passes over prompts with responses: log-probs, entropies, the policy's objective, and a critic's values.

With ``fused_head`` the logits of a micro-batch are never in memory together: the LM head is applied to the last hidden
states of a few tokens at a time, by :mod:`rlprims.logprobs`.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlprims.algorithms import Algorithm, ObjectiveTerm, objective_parts
from rlprims.execution.hf._alone import check_lengths
from rlprims.execution.hf._families import FUSED_HEAD_MODELS
from rlprims.execution.hf._packed import Layout, packed_inputs, packed_layout
from rlprims.execution.hf._routes import ROUTES
from rlprims.execution.hf._vision import INPUTS
from rlprims.logprobs import entropy_from_logits, from_hidden, from_logits, fused_loss
from rlprims.types import SamplingSupport, token_wise

_POLICY_MASK, _WEIGHTS = "policy_mask", "token_weights"
"""Columns of the tiles of :func:`fused_objective`."""

ANSWERS, LAYOUT = "answers", "layout"
"""What :func:`with_places` adds to a micro-batch."""

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Names of a config's factor of the logits, in Cohere, Granite, Falcon H1 and others."""


class Head(NamedTuple):
    """The LM head: logits = hidden @ weightᵀ, and then soft_cap · tanh(logits / soft_cap) if there is a soft cap."""

    weight: Tensor
    soft_cap: float | None


def head_of(model: nn.Module) -> Head:
    """The head of a model that :func:`check_fused_head` accepts."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    if isinstance(weight, DTensor):  # each rank has some rows of it, and the same hidden states
        weight = weight.full_tensor()
    return Head(weight, getattr(config, "final_logit_softcapping", None))


def check_fused_head(model: nn.Module) -> None:
    """Raise an error if the model's logits are not computed as in :class:`Head`."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    scales = [name for name in _SCALES if getattr(config, name, None) not in (None, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:  # type: ignore[operator]
        reason = "its LM head has a bias"
    elif scales:
        reason = f"it scales its logits by {scales[0]}"
    elif config.model_type not in FUSED_HEAD_MODELS:
        reason = "no test fuses the head of this type"
    else:
        return
    raise ValueError(
        f"model.fused_head: expected logits = hidden states x weight, got a {config.model_type}: {reason}. "
        "Set model.fused_head: false"
    )


def is_sum_of_token_losses(algorithm: Algorithm) -> bool:
    """Whether :func:`fused_objective` can compute the objective: a weighted sum of token-wise losses.

    Such losses are declared by ``rlprims.types.token_wise``, and must not use entropies or other tokens of the
    vocabulary. The aggregation must be linear: one of ``rlprims.losses``, or one with ``aggregation.linear = True``.
    """
    means = algorithm.aggregations
    linear = all(mean.path.startswith("rlprims.losses.") or getattr(mean.fn, "linear", False) for mean in means)
    return algorithm.token_wise and linear and not algorithm.loss_needs & {"topk_log_probs", "hidden"}


def aggregation_weights(part: ObjectiveTerm, data: Mapping[str, Tensor]) -> Tensor:
    """(B, T): the weight of each token's loss in a part's mean, which is the gradient of a linear aggregation."""
    zero = torch.zeros(data["response_mask"].shape, device=data["response_mask"].device, requires_grad=True)
    (weights,) = torch.autograd.grad(part.mean(data, zero), zero)
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
    top: int = 0,
) -> dict[str, Tensor]:
    """``log_probs`` and ``entropies``, (B, T), if requested: within the kept sets if the batch has them.

    Also ``whole_log_probs``, over the whole vocabulary, without gradient; with a fused head ``hidden`` (B, T, H), else
    ``topk_log_probs`` (B, T, K) of the tokens in ``topk_ids``: those of the batch, or the ``top`` likeliest.
    """
    output, batch = _before_responses(model, batch, packing=packing, hidden=fused_head)
    answers = batch[ANSWERS]
    ids, kept, found = batch["responses"].flatten()[answers], _kept_of(batch), dict[str, Tensor]()
    if fused_head:
        head = head_of(model)
        scores = partial(from_hidden, temperature=temperature, soft_cap=head.soft_cap)
        found |= {"hidden": output} if "hidden" in wanted else {}
        if "log_probs" in wanted or "entropies" in wanted:
            both = scores(output, head.weight, ids, kept)
            found |= {name: x for name, x in both._asdict().items() if name in wanted}
        if "entropies" in found and not entropy_gradient:
            found["entropies"] = found["entropies"].detach()
        if "whole_log_probs" in wanted:
            found["whole_log_probs"] = scores(output.detach(), head.weight.detach(), ids).log_probs
    else:
        if "log_probs" in wanted:
            found["log_probs"] = from_logits(output, ids, kept, temperature=temperature)
        if "entropies" in wanted:
            with torch.set_grad_enabled(entropy_gradient):
                found["entropies"] = entropy_from_logits(output, kept, temperature=temperature)
        if "whole_log_probs" in wanted:
            found["whole_log_probs"] = from_logits(output.detach(), ids, temperature=temperature)
        if "topk_log_probs" in wanted:
            tokens = (
                batch["topk_ids"].flatten(0, 1)[answers] if "topk_ids" in batch else output.detach().topk(top).indices
            )
            scaled = output.float() / temperature
            found["topk_log_probs"] = scaled.gather(-1, tokens) - scaled.logsumexp(-1, keepdim=True)
            found["topk_ids"] = tokens
    return {name: _to_rows(x, batch) for name, x in found.items()}


def fused_objective(
    model: nn.Module, batch: dict[str, Tensor], algorithm: Algorithm, *, temperature: float, packing: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's objective, computed for a few tokens at a time, and the result of :func:`token_scores`."""
    head = head_of(model)
    hidden, batch = _before_responses(model, batch, packing=packing, hidden=True)
    answers, shape = batch[ANSWERS], batch["responses"].shape
    tokens = {n: x.flatten()[answers] for n, x in batch.items() if isinstance(x, Tensor) and x.shape == shape}
    ids, parts, kept = tokens.pop("responses"), objective_parts(algorithm), _kept_of(batch)
    # Each part of the objective has its own tokens and weights; a tile is masked by the tokens of all of them.
    mask = torch.stack([part.mask(batch) for part in parts]).any(0).flatten()[answers]
    tokens[_POLICY_MASK] = tokens.pop("response_mask")
    for i, part in enumerate(parts):
        tokens[f"{_WEIGHTS}.{i}"] = aggregation_weights(part, batch).flatten()[answers]

    @token_wise
    def losses(**data: Tensor) -> Tensor:
        data["response_mask"] = data[_POLICY_MASK]
        return torch.stack([data[f"{_WEIGHTS}.{i}"] * part.losses(data) for i, part in enumerate(parts)]).sum(0)

    ones = torch.ones(ids.shape, device=ids.device)
    scale: Any = {"temperature": temperature, "soft_cap": head.soft_cap}
    loss, log_probs, entropies = fused_loss(hidden, head.weight, ids, ones, mask, losses, tokens, kept, **scale)
    scores = {"log_probs": log_probs, "entropies": entropies}
    if kept is not None:
        scores["whole_log_probs"] = from_hidden(hidden.detach(), head.weight.detach(), ids, **scale).log_probs
    return loss, {name: _to_rows(x, batch) for name, x in scores.items()}


def response_values(critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B, T): the value of the state in which each response token was sampled."""
    check_lengths(critic.config, batch["attention_mask"].sum(-1))
    columns = _columns_before_responses(batch)
    values: Tensor = critic(**_padded_inputs(batch), use_cache=False).logits
    return values[:, columns, 0].float()


def last_token_scores(classifier: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B,): the output of a sequence classifier with one label at the last token of each row."""
    inputs = _padded_inputs(batch)
    position = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)
    last = torch.where(inputs["attention_mask"].bool(), position, 0).argmax(-1)
    hidden = classifier.base_model(**inputs, use_cache=False).last_hidden_state  # type: ignore[operator]
    scores: Tensor = classifier.score(hidden[torch.arange(len(last), device=last.device), last])  # type: ignore[operator]
    return scores[:, 0].float()


def with_places(batch: dict[str, Any], *, packing: bool, layout: Layout | None = None) -> dict[str, Any]:
    """The batch with ``answers``, int64 (M,), the places of its attended response tokens, and with its layout.

    They have as many elements as there are tokens. On a device the process would wait for these numbers.
    """
    if ANSWERS in batch:
        return batch
    attended = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
    places = {ANSWERS: rearrange(attended, "b t -> (b t)").nonzero()[:, 0]}
    return {**batch, **places, **({LAYOUT: layout or packed_layout(batch)} if packing else {})}


def _before_responses(
    model: nn.Module, batch: dict[str, Any], *, packing: bool, hidden: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Logits (M, V) or last hidden states (M, H) at the token before each of the M attended response tokens.

    Also the batch with the places of these. The head is applied to these tokens only.
    """
    batch = with_places(batch, packing=packing)
    check_lengths(model.config, batch["attention_mask"].sum(-1))
    if packing := packing and LAYOUT in batch:  # else of another model, which is not packed
        layout = batch[LAYOUT]
        inputs, columns = packed_inputs(layout), layout.predicting
        routes = layout.routes
    else:
        inputs, columns = _padded_inputs(batch), _columns_before_responses(batch)
        routes = rearrange(batch[ROUTES], "b t l k -> (b t) l k") if ROUTES in batch else None
    if routes is not None:
        inputs["routes"] = routes
    output: Tensor
    if hidden:
        output = model.base_model(**inputs, use_cache=False).last_hidden_state[:, columns]  # type: ignore[operator]
    else:
        output = model(**inputs, use_cache=False, logits_to_keep=columns).logits
    return (output[0] if packing else output.flatten(0, 1)[batch[ANSWERS]]), batch


def _padded_inputs(batch: dict[str, Any]) -> dict[str, Tensor]:
    attention = batch["attention_mask"].long()
    return {
        "input_ids": torch.cat([batch["prompts"], batch["responses"]], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        **batch.get(INPUTS, {}),
    }


def _columns_before_responses(batch: dict[str, Tensor]) -> Tensor:
    """(T,): the column before each response token, in the padded rows."""
    prompts, responses = batch["prompts"], batch["responses"]
    return torch.arange(responses.shape[1], device=responses.device) + prompts.shape[1] - 1


def _kept_of(batch: dict[str, Any]) -> SamplingSupport | None:
    """The kept sets of the attended response tokens."""
    kept: SamplingSupport | None = batch.get("kept")
    return None if kept is None else kept.take(batch[ANSWERS])


def _to_rows(x: Tensor, batch: dict[str, Any]) -> Tensor:
    """(M, ...) to (B, T, ...), 0 elsewhere."""
    shape: torch.Size = batch["responses"].shape
    return x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, batch[ANSWERS], x).reshape(*shape, *x.shape[1:])
