"""LoRA (arXiv:2106.09685) by peft: adapters beside a model's linear layers, trained instead of its weights.

peft replaces linear layers by layers that add B A x. In a model without adapters all weights are trained.
"""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Conv1D

from rlprims._extras import hint
from rlprims.execution import LoraConfig
from rlprims.execution.hf._vision import tower

HEADS = ("score", "classifier")
"""Names of a critic's head, all of whose weights are trained."""
_NAME = "default"
_PREFIX = "base_model.model."
_FILE = "adapter_model.safetensors"


def adapt(model: nn.Module, config: LoraConfig | None) -> nn.Module:
    """With a config, freeze the model and add adapters to it, in place; a critic's head stays trainable.

    Trained parameters are float32 in every model: their steps are smaller than what bfloat16 can represent.
    """
    if config is None:
        return model
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"model.lora needs peft: {hint('lora')}")
    from peft import inject_adapter_in_model

    heads = [head for head in HEADS if hasattr(model, head)]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    bare = nn.ModuleDict({"model": model})  # without a config: by that of a mixture peft adapts routers and experts
    modules = {name: layer for name, layer in bare.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}
    linear = sorted({name.split(".")[-1] for name in modules})
    weights = [id(layer.weight) for layer in modules.values()]  # merged, those of tied layers would differ
    seeing = [name for name, layer in modules.items() if f"{name.removeprefix('model.')}.weight" in tower(model)]
    alone = [name for name, layer in modules.items() if layer not in ends and weights.count(id(layer.weight)) == 1]
    between = [name for name in alone if name not in seeing and not _is_read_apart(bare, name)]
    targets = between if config.target_modules == "all-linear" else list(config.target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            inject_adapter_in_model(_settings(config, targets, exclude_modules=[*heads, *seeing] or None), bare)
        except ValueError as error:
            raise ValueError(f"model.lora.target_modules: {error} Linear layers here: {', '.join(linear)}") from None
    model.lora_config = config  # type: ignore[assignment]
    if wrong := [name for name, _ in _layers(model) if f"model.{name}" not in between]:
        reason = "is not a linear layer between embedding and head that alone reads its weight"
        raise ValueError(f"model.lora.target_modules: {wrong[0]} {reason}")
    for head in heads:
        layer = getattr(model, head).requires_grad_(True)
        layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].to(layer.weight.dtype),))
    for parameter in trained(model).values():
        parameter.data = parameter.data.float()
    return model


def _is_read_apart(model: nn.Module, name: str) -> bool:
    """Whether a router, or a kernel of a state space, reads the weight without the layer, and so without adapters."""
    *path, last = name.split(".")
    parent = model.get_submodule(".".join(path))
    is_state_space = hasattr(parent, "A_log") and hasattr(parent, "D")
    routes = any("Router" in type(module).__name__ for module in (parent, parent.get_submodule(last)))
    return routes or (is_state_space and last in ("dt_proj", "out_proj", "x_proj"))


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, without the prefix that activation checkpointing adds."""
    return {_unwrapped(name): parameter for name, parameter in model.named_parameters()}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in parameters(model).items() if parameter.requires_grad}


def freeze(critic: nn.Module, parts: Iterable[str]) -> nn.Module:
    """The critic. Its weights whose names contain one of these parts are not trained."""
    weights = trained(critic)
    for part in parts:
        found = [x.requires_grad_(False) for name, x in weights.items() if part in name]
        if not found or not trained(critic):
            which = "every trained weight" if found else f"no trained weight, of which one is {next(iter(weights))}"
            raise ValueError(f"critic.freeze: {part!r} is in the name of {which}")
    return critic


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "lora_config")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes without its adapters, as before :func:`adapt`."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        # peft's own switch also changes requires_grad, which FSDP reads at the first forward pass and keeps.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a plain model from those of an adapted one, or of whole layers of it: W + (alpha / rank) B A."""
    result = {name.replace(".base_layer.", "."): x for name, x in state.items() if ".lora_" not in name}
    for name, layer in _layers(model):
        if f"{name}.base_layer.weight" not in state:
            continue
        a, b = (state[f"{name}.lora_{which}.{_NAME}.weight"] for which in "AB")
        weight = result[f"{name}.weight"]
        change = (b @ a) * layer.scaling[_NAME]
        change = change.T if layer.fan_in_fan_out else change
        result[f"{name}.weight"] = (weight.to(change.dtype) + change).to(weight.dtype)
    return result


def frozen(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not trained."""
    return [parameter for parameter in parameters(model).values() if not parameter.requires_grad]


def checksum(model: nn.Module) -> str:
    """A checksum of the weights that are not trained: the sum of their bits as integers, equal on every machine."""
    return str(sum(sum_of_bits(parameter) for parameter in frozen(model)))


def sum_of_bits(x: Tensor) -> int:
    """The sum of a tensor's bits, read as integers: the sum of those of its parts, also with zeros appended."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integers = x.detach().contiguous().view(bits[x.element_size()])
    if integers.device.type == "cpu":  # numpy adds small integers ten times as fast as torch
        return int(integers.numpy().sum(dtype=np.int64))
    return int(integers.sum(dtype=torch.int64))


def save_adapter(
    directory: Path,
    state: Mapping[str, Tensor],
    config: LoraConfig,
    *,
    base: str,
    base_checksum: str = "",
    scores_sequences: bool = False,
) -> None:
    """Write the trained tensors for ``peft.PeftModel.from_pretrained``; critics and reward models also have a head."""
    targets = sorted({name.split(".lora_")[0] for name in state if ".lora_" in name})
    heads = sorted({name.split(".")[0] for name in state if name.startswith(HEADS)})
    directory.mkdir(parents=True)
    settings = _settings(config, targets, base_model_name_or_path=base, inference_mode=True)
    of_head = "SEQ_CLS" if scores_sequences else "TOKEN_CLS"
    settings.task_type, settings.modules_to_save = (of_head, heads) if heads else ("CAUSAL_LM", None)
    settings.save_pretrained(directory)
    tensors = {_stored(name): x.contiguous() for name, x in state.items()}
    save_file(tensors, directory / _FILE, metadata={"format": "pt", "base_checksum": base_checksum})


def check_base(model: nn.Module, directory: Path, checksum: str) -> None:
    """Check that the model, whose :func:`checksum` is given, has the weights that the adapter was trained with."""
    with safe_open(directory / _FILE, "pt") as file:
        was = file.metadata()["base_checksum"]
    if was != checksum:
        raise ValueError(
            f"{directory} was trained on other weights than {model.config.name_or_path} has now: "  # type: ignore[union-attr]
            "restore the model of the run's start"
        )


def lora_of(directory: Path) -> LoraConfig:
    """The settings that :func:`save_adapter` wrote."""
    stored = json.loads((directory / "adapter_config.json").read_text())
    rank, alpha, stabilized = stored["r"], stored["lora_alpha"], stored["use_rslora"]
    return LoraConfig(rank=rank, alpha=alpha, rank_stabilized=stabilized, target_modules=stored["target_modules"])


@torch.no_grad()
def load_adapter(model: nn.Module, directory: Path) -> None:
    """Load what :func:`save_adapter` wrote."""
    file = directory / _FILE
    stored = load_file(file) if file.exists() else {}
    parameters_by_name = {_stored(name): parameter for name, parameter in trained(model).items()}
    lost = [name for name, p in parameters_by_name.items() if name not in stored or stored[name].shape != p.shape]
    unknown = sorted(stored.keys() - parameters_by_name.keys())
    if lost or unknown:
        raise ValueError(f"{directory} does not fit the model: lacks {lost[:3]}, has unknown {unknown[:3]}")
    for name, parameter in parameters_by_name.items():
        parameter.copy_(stored[name])


def _settings(config: LoraConfig, targets: list[str], **more: Any) -> Any:
    from peft import LoraConfig as Settings

    given = {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.rank_stabilized}
    return Settings(**given, target_modules=targets, lora_dropout=0.0, **more)


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    if not is_adapted(model):
        return []
    from peft.tuners.lora import LoraLayer

    return [(_unwrapped(name), layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]


def _unwrapped(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def _stored(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")
