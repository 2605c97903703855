"""The load-balancing loss of the policy's routers in an optimizer step, :func:`rlprims.losses.load_balance`.

It is over the tokens of each row with a valid response token, prompts too, except the last one, which is not read. A
prompt that rows share counts for each of them, so that packed and padded are the same.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import AutoConfig

from rlprims.execution import ModelConfig
from rlprims.execution.hf._forward import LAYOUT
from rlprims.execution.hf._micro_batches import Part
from rlprims.execution.hf._packed import Layout
from rlprims.execution.hf._routes import are_read, heard
from rlprims.execution.hf._scorer import Scorer
from rlprims.losses import load_balance
from rlprims.types import Mean, Metrics

Forward = Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]]
_LOGITS_AND_EXPERTS = itemgetter(0, 2)


def router_note(config: ModelConfig) -> str | None:
    """A note if the model's config.json asks for the loss, and the run does not."""
    settings = AutoConfig.from_pretrained(config.here(weights=False).path).get_text_config()
    asked = getattr(settings, "output_router_logits", False) and getattr(settings, "router_aux_loss_coef", 0)
    if not asked or config.router_aux_loss_coef:
        return None
    return f"the load-balancing loss of {config.path} is off; model.router_aux_loss_coef={asked:g} trains with it"


def with_router_loss(forward: Forward, parts: Callable[[], Iterable[Part]], scorer: Scorer) -> Forward:
    """``forward`` with the loss added. The experts' counts are those of all ``parts``, which are read once for them."""
    step: Tensor | None = None
    for part in parts():
        if part.is_last and step is None and scorer.ranks.size == 1:
            break  # a single micro-batch is counted in its update
        with torch.no_grad(), heard(scorer.module, _LOGITS_AND_EXPERTS) as outputs:
            scorer.token_scores(part.data, ())
        counts = _counts(outputs, _readers(part.data, scorer.packing))
        step = counts if step is None else step + counts
    whole = None if step is None else scorer.ranks.total(step)

    def with_loss(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        with heard(scorer.module, _LOGITS_AND_EXPERTS) as outputs:
            loss, metrics = forward(part)
        readers = _readers(part, scorer.packing)
        counts = _counts(outputs, readers) if whole is None else whole
        logits, top_k = torch.stack([x for x, _ in outputs], 1)[None], outputs[0][1].shape[-1]
        total = (load_balance(logits, readers[None] > 0, top_k=top_k, expert_counts=counts) * readers).sum()
        share = total / (counts[0].sum() / top_k).clamp(min=1)
        metrics = metrics | {"router_aux_loss": Mean(total.detach(), readers.sum())}
        return loss + scorer.model.router_aux_loss_coef * share, metrics

    return with_loss


def _readers(batch: Mapping[str, Any], packing: bool) -> Tensor:
    """int64 (N,): for how many rows each token of a forward pass counts."""
    in_loss: Tensor = batch["response_mask"].any(-1, keepdim=True)
    if packing:
        layout: Layout = batch[LAYOUT]
        return torch.bincount(layout.nodes[in_loss & (layout.nodes >= 0)], minlength=layout.input_ids.shape[1])
    return rearrange((in_loss & are_read(batch["attention_mask"])).long(), "b t -> (b t)")


def _counts(outputs: Iterable[tuple[Tensor, Tensor]], readers: Tensor) -> Tensor:
    """int64 (L, E): how many tokens each expert of each layer gets."""
    zeros = ((readers.new_zeros(logits.shape[-1]), experts) for logits, experts in outputs)
    return torch.stack([x.index_add(0, e.flatten(), readers.repeat_interleave(e.shape[-1])) for x, e in zeros])
