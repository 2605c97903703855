"""Hugging Face models: loading, saving and restoring them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

from rlprims.execution import ModelConfig
from rlprims.execution.hf._adapters import check_base, checksum, is_adapted, load_adapter, merged, save_adapter, trained
from rlprims.execution.hf._alone import check_padding
from rlprims.execution.hf._families import SHARDED_MODELS, TIME_STEP_FLOOR, auto_class, check_type, packs, sees
from rlprims.execution.hf._forward import check_fused_head
from rlprims.execution.hf._packed import use_packing
from rlprims.execution.hf._vision import ban_placeholders, check_vision, copy_processor, freeze, tower


def _load(auto: Any, path: str, config: ModelConfig, **changes: Any) -> tuple[nn.Module, list[str]]:
    try:
        settings = AutoConfig.from_pretrained(path)
        auto = auto or auto_class(config, settings)
        check_type(settings, vision=auto is AutoModelForImageTextToText)
        if settings.model_type in TIME_STEP_FLOOR:
            settings.time_step_min = 1e-30
        settings.update(changes)
        model, info = auto.from_pretrained(
            path,
            config=settings,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = f"{str(error).splitlines()[0]}{only_in_shards(path)}"
        if config.attention is not None and "attention implementation" in reason:
            reason = f"this type has no attention {config.attention}: leave model.attention out"
        kind = (auto or AutoModelForCausalLM).__name__
        raise ValueError(f"cannot load {path!r} as {kind}: {reason}") from error
    # No dropout, so that tokens have the same log-prob in sampling and in training.
    return model.to(usable_device(config)).eval(), sorted(info["missing_keys"])


def load_causal_lm(path: str, config: ModelConfig) -> nn.Module:
    """Load the policy or the reference, with the attention and head of the config."""
    model, missing = _load(None, path, config)
    if missing:
        what = "a causal language model: it was saved without that head"
        raise ValueError(f"{path!r} lacks the weights {missing[:3]} of {what}")
    return _prepared(model, config)


def _prepared(model: nn.Module, config: ModelConfig) -> nn.Module:
    if getattr(model.config, "output_router_logits", False):
        # transformers would compute a loss of its own, whose mask has other tokens than a packed or a cached pass.
        model.register_forward_pre_hook(
            lambda module, inputs, options: (inputs, {**options, "output_router_logits": False}), with_kwargs=True
        )
    check_padding(model)
    if sees(config, model.config):
        check_vision(config)
        ban_placeholders(model)
        return freeze(model, config)
    if packs(config, model.config):
        use_packing(model)
    if config.fused_head:
        check_fused_head(model)
    return model


def empty_causal_lm(path: str, config: ModelConfig) -> nn.Module | None:
    """The model of :func:`load_causal_lm`, with parameters that have shapes but no data (torch's device ``meta``).

    None if the files do not store them unchanged: a type not in :data:`SHARDED_MODELS`, other names, no safetensors.
    """
    stored = _stored_shapes(Path(path))
    if not stored:
        return None
    settings = AutoConfig.from_pretrained(path)
    if settings.model_type not in SHARDED_MODELS:
        return None
    how: Any = {"dtype": getattr(torch, config.dtype), "attn_implementation": config.attention}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(settings, **how)
    if any(stored.get(name) != list(x.shape) for name, x in model.named_parameters()):
        return None
    for module in model.modules():  # a config alone gives the buffers of these types, which are rotary frequencies
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=usable_device(config)))
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    if (Path(path) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return _prepared(model.eval(), config)


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a folder's safetensors."""
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"cannot load {str(file)!r}: {error}") from None
    return shapes


_NEW_HEAD = {"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": 0.0}
"""The config of a model whose new head gives one number."""


def load_critic(path: str, config: ModelConfig) -> nn.Module:
    """Load the model with a new head of one number. The head's weights begin at 0, so that the first values are 0."""
    model, missing = _load(AutoModelForTokenClassification, path, config, **_NEW_HEAD)
    _zero_head(model, path, missing, ("score.", "classifier."), "the critic's model")
    return model


def load_new_classifier(path: str, config: ModelConfig) -> nn.Module:
    """Load a sequence classifier of one label for training, with its own head or a new one whose weights begin at 0."""
    model, missing = _load(AutoModelForSequenceClassification, path, config, **_NEW_HEAD)
    _check_decoder(model, path)
    _zero_head(model, path, missing, ("score.",), "a decoder")
    return model


def _zero_head(model: nn.Module, path: str, missing: list[str], heads: tuple[str, ...], what: str) -> None:
    head = {name: parameter for name, parameter in model.named_parameters() if name in missing}
    if any(not name.startswith(heads) for name in head):
        raise ValueError(f"{path!r} lacks the weights {missing[:3]} of {what}")
    for parameter in head.values():
        nn.init.zeros_(parameter)


def _check_decoder(classifier: nn.Module, path: str) -> None:
    if not hasattr(classifier, "score"):
        raise ValueError(f"{path!r} is a {type(classifier).__name__}: only decoders are scored, at their last token")


def vocabulary_of(path: str) -> dict[str, int]:
    return AutoTokenizer.from_pretrained(path).get_vocab()  # type: ignore[no-any-return]


def check_vocabularies(model: ModelConfig) -> None:
    """Raise an error if a teacher's vocabulary differs from the policy's: the same ids would be other texts."""
    for path in {*model.teachers.values()} - {model.path}:
        try:
            differs = vocabulary_of(path) != vocabulary_of(model.path)
        except (OSError, ValueError) as error:
            reason = f"{str(error).splitlines()[0]}{only_in_shards(path)}"
            raise ValueError(f"model.teacher: cannot load {path!r}: {reason}") from None
        if differs:
            raise ValueError(f"model.teacher: {path!r} has another vocabulary than {model.path!r}: the ids differ")


def load_classifier(path: str, config: ModelConfig) -> nn.Module:
    """Load a reward model: a sequence classifier with one label."""
    model, missing = _load(AutoModelForSequenceClassification, path, config)
    settings: Any = model.config
    if missing:
        raise ValueError(f"{path!r} lacks the weights {missing[:3]} of a sequence classifier: saved without them")
    if settings.num_labels != 1:
        raise ValueError(f"{path!r} has {settings.num_labels} labels, and a reward model has one: its score")
    _check_decoder(model, path)
    return model.requires_grad_(False)


def device_of(config: ModelConfig) -> torch.device:
    """The device that the config names. A cluster's driver need not have it."""
    is_auto = config.device == "auto"
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if is_auto else config.device)


def usable_device(config: ModelConfig) -> torch.device:
    """The device for the models."""
    device = device_of(config)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ValueError(f"model.device={config.device}: {reason}; use auto, cpu, or a device that is here") from None
    return device


def save_model(model: Any, directory: Path, state: dict[str, Tensor]) -> None:
    """Write a model for Hugging Face from its whole tensors. An adapted model is merged; its adapter is saved too."""
    if is_adapted(model):
        adapter = {name: state[name] for name in trained(model)}
        save_adapter_of(model, directory, adapter, base_checksum=checksum(model))
    model.save_pretrained(directory, state_dict=merged(model, state))
    if tower(model):
        copy_processor(model.config.name_or_path, directory)


def save_adapter_of(model: Any, directory: Path, state: dict[str, Tensor], *, base_checksum: str) -> None:
    """Write the adapter of the model in ``directory``, beside it, from the whole trained tensors."""
    save_adapter(
        adapter_of(directory),
        state,
        model.lora_config,
        base=model.config.name_or_path,
        base_checksum=base_checksum,
        scores_sequences=type(model).__name__.endswith("ForSequenceClassification"),
    )


def restore(model: nn.Module, directory: Path) -> None:
    """Load what :func:`save_model` wrote into a model that is already built. An adapted model loads its adapter."""
    if is_adapted(model):
        load_adapter(model, adapter_of(directory))
        check_base(model, adapter_of(directory), checksum(model))
        return
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    state = model.state_dict()
    if tower(model) or any(".experts." in name for name in tensors.keys() - state.keys()):
        # transformers stores the experts of a layer one by one, and parts of a vision model under other names.
        kind: Any = type(model)
        tensors = kind.from_pretrained(directory, dtype="auto", use_safetensors=True).state_dict()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    loaded = {state[name].data_ptr() for name in tensors if name in state}
    lost = [name for name in missing if state[name].data_ptr() not in loaded]  # a tied weight is stored once
    if lost or unexpected:
        raise ValueError(f"{directory} does not fit the model: lacks {lost[:3]}, has unknown {list(unexpected)[:3]}")


def adapter_of(directory: Path) -> Path:
    """The directory of a saved model's adapter."""
    return directory.with_name(f"{directory.name}_adapter")


def shards_of(model: Path) -> Path:
    """The folder with the shards of a checkpoint's model: ``step_000050/policy_shards`` of ``step_000050/policy``."""
    return model.with_name(f"{model.name}_shards")


def only_in_shards(model: str) -> str:
    """What to do if a model is named that is in shards alone; empty text otherwise."""
    path = Path(model)
    if path.exists() or not shards_of(path).is_dir():
        return ""
    run, step = path.parent.parent.parent, path.parent.name.removeprefix("step_").lstrip("0")
    return f"; this checkpoint has it in shards: rlprims export {run} {path} --step {step} --model {path.name}"
