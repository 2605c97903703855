"""Tensor parallelism: divide the layers of a model over the ranks of a group, which compute the same rows together.

For most types of models, transformers has a plan: it names the linear layers that are divided by their outputs
(colwise) and by their inputs (rowwise). torch's parallel styles divide them, into DTensors over the ranks of a group.
Each rank computes the whole of all other modules, such as norms and the embedding.
"""

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlprims.algorithms import Algorithm
from rlprims.execution import ModelConfig, RayConfig
from rlprims.execution.hf._families import TENSOR_PARALLEL_MODELS, without_data


class Computed(ParallelStyle):
    """The style of a module that computes with its whole parameters on every rank.

    Every rank stores them whole (``stored`` is Replicate) or in part (Shard(0)). Their ``gradients`` are Partial, and
    summed, if the ranks have different inputs, such as their own heads; with the same inputs they are Replicate.
    """

    def __init__(self, stored: Placement, gradients: Placement) -> None:
        self.stored, self.gradients = stored, gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, x in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(x, device_mesh, [self.stored], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=x.requires_grad))
        forward = module.forward

        def with_whole_parameters(*args: Any, **kwargs: Any) -> Any:
            stored: dict[str, Any] = dict(module._parameters)
            module._parameters |= {name: self._whole(x) for name, x in stored.items()}
            try:
                return forward(*args, **kwargs)
            finally:
                module._parameters |= stored

        module.forward = with_whole_parameters
        return module

    def _whole(self, x: Any) -> Any:
        if x is None:  # a bias that is None
            return None
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[self.gradients])


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: Computed(Shard(0), Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: Computed(Replicate(), Partial()),
}
"""The styles of torch, by their names in transformers."""

_DIVIDING = _STYLES.keys() - {"replicated_with_grad_allreduce"}


def divide(module: Any, mesh: DeviceMesh) -> None:
    """Divide a model's layers over the ranks of a mesh of one dimension. Tied parameters stay tied."""
    styles = styles_of(module, mesh.size())
    # Two warnings of torch do not apply here: of logits that are changed in place, and of gathering in two steps.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    parallelize_module(module, mesh, styles, src_data_rank=None)
    if is_tied:
        head.weight = embedding.weight


def styles_of(module: Any, size: int) -> dict[str, ParallelStyle]:
    """Return the style of each module that has parameters, by its name, for groups of ``size`` ranks."""
    config = module.config.get_text_config()
    kind, plan = config.model_type, dict(module.tp_plan)
    if kind not in TENSOR_PARALLEL_MODELS or not plan:
        raise _refusal(size, f"expected one of the tested types {', '.join(TENSOR_PARALLEL_MODELS)}, got a {kind}")
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    if any(count is not None and count % size for count in heads.values()):
        raise _refusal(size, f"expected a number that divides {heads}, got one that does not")
    named = {name: x for name, x in module.named_modules() if next(x.parameters(recurse=False), None) is not None}
    planned = {name: style for name in named if (style := plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))) is not None}
    if unknown := set(planned.values()) - _STYLES.keys():
        raise _refusal(size, f"expected a plan of linear layers, got one with {sorted(unknown)}")
    ends = {id(x) for x in (module.get_input_embeddings(), module.get_output_embeddings())}
    styles: dict[str, ParallelStyle] = {}
    for name, x in named.items():
        style = planned.get(name)
        if id(x) in ends and x.weight.shape[0] % size:  # the size does not divide the vocabulary
            styles[name] = Computed(Replicate(), Replicate())
        elif style is not None:
            if style in _DIVIDING and x.weight.shape[style.startswith("rowwise")] % size:
                shape = "x".join(map(str, x.weight.shape))
                raise _refusal(size, f"expected a number that divides the layers, got {name} of {shape}")
            styles[name] = _STYLES[style]()
        elif any(planned.get(near) == "colwise" for near in named if _parent(near) == _parent(name)):
            raise _refusal(size, f"expected a plan for {name}, which is between divided layers, got none for it")
        else:  # embedding and head are large, so each rank stores a part of them
            styles[name] = Computed(Shard(0) if id(x) in ends else Replicate(), Replicate())
    return styles


def check_plans(cluster: RayConfig, model: ModelConfig, algorithm: Algorithm) -> None:
    """Check that ``ray.training_tensor_parallel`` can divide the models. This reads only the configs of the models."""
    size = cluster.training_tensor_parallel
    if size == 1:
        return
    if model.lora is not None:
        raise _refusal(size, "expected a model that is trained as a whole, got model.lora")
    needs = algorithm.needs
    causal = {model.path, *([model.reference] if model.reference and "ref_log_probs" in needs else [])}
    if algorithm.needs_teacher:
        causal |= set(model.teachers.values())
    critics = {model.critic or model.path} if "values" in needs else set()
    for auto, paths in ((AutoModelForCausalLM, causal), (AutoModelForTokenClassification, critics)):
        for path in sorted(paths):
            styles_of(without_data(auto, path), size)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _refusal(size: int, what: str) -> ValueError:
    return ValueError(f"ray.training_tensor_parallel={size}: {what}; use another number, or 1 and more shards")
