"""The experts of a mixture of experts: recorded while the sampler reads tokens, and used again by the policy.

The column ``routed_experts`` int16 (B, P+T, L, K) has them: -1 for padding and for a row's last token, never read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlprims.data_proto import DataProto
from rlprims.execution.hf._families import ROUTED_MODELS, without_data
from rlprims.routing import UNKNOWN, replay

ROUTES = "routed_experts"


def routed_layers(path: str, off: str = "replay_routes: false") -> list[int]:
    """The numbers of the layers that have experts."""
    model = without_data(AutoModelForCausalLM, path)
    check_routed(model, off)
    blocks = list(model.base_model.layers)
    return [blocks.index(block) for block, _ in _routers(model)]


def check_routed(model: nn.Module, off: str = "replay_routes: false") -> None:
    """Raise an error if the routers of this model cannot be read; ``off`` is the setting that does not ask for it."""
    kind = model.config.get_text_config().model_type  # type: ignore[union-attr,operator]
    if kind not in ROUTED_MODELS:
        reason = f"a {kind}; tested types are {', '.join(ROUTED_MODELS)}"
    elif not _routers(model):
        reason = f"a {kind} in which no layer has experts"
    else:
        return
    name = off.partition(":")[0]
    raise ValueError(f"model.{name}: expected a mixture of experts, got {reason}. Set model.{off}")


def _routers(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Each layer that has experts, with its router: ``layer.mlp.gate``. FSDP and checkpointing may have wrapped it."""
    modules = dict(model.named_modules())
    found = [name for name, module in modules.items() if type(module).__name__.endswith("TopKRouter")]
    return [(modules[name.rsplit(".", 2)[0]], modules[name]) for name in found]


@contextmanager
def heard(model: nn.Module, read: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """A list to which each layer's router adds what ``read`` takes from its output: logits, gates, chosen experts."""
    outputs: list[Any] = []
    handles = [
        router.register_forward_hook(lambda module, inputs, output: outputs.append(read(output)))
        for _, router in _routers(model)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Record the experts of the model; the yielded function returns those since its last call, int16 (N, L, K)."""
    check_routed(model)
    routers = [router for _, router in _routers(model)]
    with heard(model, lambda output: output[2]) as experts:

        def take() -> Tensor:
            none = torch.zeros(0, routers[0].top_k, dtype=torch.int16)  # type: ignore[call-overload]
            of_layers = (experts[layer :: len(routers)] for layer in range(len(routers)))
            layers = [torch.cat([none, *(x.to(torch.int16).cpu() for x in layer)]) for layer in of_layers]
            experts.clear()
            return torch.stack(layers, 1)

        yield take


def replay_routes(model: nn.Module) -> None:
    """Make the model take an argument ``routes``, (N, L, K): the experts of the N tokens of a forward pass.

    The model's own router gives the gates, and the experts of a token whose entries are -1. Each layer gets the
    argument, so that one that is computed again in the backward pass (activation checkpointing) has it too.
    """
    check_routed(model)
    for number, (layer, router) in enumerate(_routers(model)):
        _replay_in(layer, router, number)


def _replay_in(layer: nn.Module, router: nn.Module, number: int) -> None:
    given: list[Tensor] = []

    def before_layer(module: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given.clear()
        routes: Tensor | None = options.get("routes")
        if routes is not None:
            given.append(routes[:, number].long())
        return inputs, {name: x for name, x in options.items() if name != "routes"}

    def after_router(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not given:
            return output
        logits, gates, chosen = output
        routes = given.pop()
        experts = torch.where(routes == UNKNOWN, chosen, routes)
        # A router without the attribute divides by the sum over the chosen experts, as Mixtral's does.
        renormalize = getattr(module, "norm_topk_prob", True)
        replayed = replay(logits, experts, renormalize=renormalize).gather(-1, experts)
        return logits, replayed.to(gates.dtype), experts

    layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    router.register_forward_hook(after_router)


def are_read(attention_mask: Tensor) -> Tensor:
    """bool (B, P+T): the tokens that a sampler reads: all of a row except the last.

    >>> are_read(torch.tensor([[0, 1, 1, 1, 0]])).tolist()
    [[False, True, True, False, False]]
    """
    return attention_mask.bool() & (attention_mask.long().flip(1).cumsum(1).flip(1) > 1)


def routes_column(routes: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """The column of a batch from the experts of the tokens that were read, int16 (N, L, K), row after row."""
    column = routes.new_full((*attention_mask.shape, *routes.shape[1:]), UNKNOWN)
    column[are_read(attention_mask)] = routes
    return {ROUTES: column}


def without_routes(batch: DataProto) -> DataProto:
    """The batch without recorded experts, for a model that is not the policy."""
    if ROUTES not in batch:
        return batch
    return batch.select(batch_keys=[name for name in batch.batch.keys() if name != ROUTES])  # noqa: SIM118


def tree_ids(tokens: Tensor, routes: Tensor, device: torch.device) -> Tensor:
    """int64 (B, P+T): equal numbers for equal tokens with equal experts, and for no others.

    Rows share a token of a prefix tree only if it had the same experts in each. They are a random hash of 63 bits.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (1 + routes[0, 0].numel(),), generator=generator) | 1
    weights = weights.to(device)

    def hashed(ids: Tensor, experts: Tensor) -> Tensor:
        of_experts = rearrange(experts.to(device).long(), "t l k -> t (l k)") * weights[1:]
        return (ids.to(device) * weights[0] + of_experts.sum(1)) & (2**63 - 1)

    # One row at a time: in int64 the experts take four times the memory.
    return torch.stack([hashed(*row) for row in zip(tokens, routes, strict=True)]).to(tokens.device)
