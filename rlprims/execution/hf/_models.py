"""Loading Hugging Face models, and the two forwards: logits and values of the response's tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rlprims.execution._config import ModelConfig
from rlprims.execution.hf._adapters import check_base, checksum, is_adapted, load_adapter, merged, save_adapter, trained
from rlprims.execution.hf._head import part_head_if_equal
from rlprims.execution.hf._linear import widen
from rlprims.execution.hf._packed import pack_if_equal


def _load(auto: Any, path: str, config: ModelConfig, **changes: Any) -> tuple[nn.Module, list[str]]:
    try:
        settings = AutoConfig.from_pretrained(path)
        for name, value in changes.items():
            setattr(settings, name, value)
        model, info = auto.from_pretrained(
            path,
            config=settings,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load {path!r} as {auto.__name__}: {str(error).splitlines()[0]}") from error
    model = model.to(device_of(config))
    widen(model)
    # No dropout, ever: the same tokens must have the same log-prob when sampled and when trained.
    return model.eval(), sorted(info["missing_keys"])


def load_causal_lm(path: str, config: ModelConfig) -> nn.Module:
    """The policy or the reference.

    Raises:
        ValueError: no model is there, or it has no language-model head.
    """
    model, missing = _load(AutoModelForCausalLM, path, config)
    if missing:
        raise ValueError(
            f"{path!r} lacks the weights {missing[:3]} of a causal language model: it was saved without that head"
        )
    if config.attention == "sdpa":
        pack_if_equal(model, response_logits)
    if config.fused_head == "auto":
        part_head_if_equal(model, response_logits)
    return model


def load_critic(path: str, config: ModelConfig) -> nn.Module:
    """The model under a new head of one number, which begins at 0, so that the first values are 0."""
    model, missing = _load(
        AutoModelForTokenClassification, path, config, num_labels=1, classifier_dropout=0.0, hidden_dropout=0.0
    )
    head = {name: p for name, p in model.named_parameters() if name in missing}
    if any(not name.startswith(("score.", "classifier.")) for name in head):
        raise ValueError(f"{path!r} lacks the weights {missing[:3]} of the critic's model")
    for parameter in head.values():
        nn.init.zeros_(parameter)
    return model


def load_classifier(path: str, config: ModelConfig) -> nn.Module:
    """A reward model: of one label, whose head reads the last column.

    Raises:
        ValueError: no model is there, it has no such head, or it is an encoder.
    """
    model: Any
    model, missing = _load(AutoModelForSequenceClassification, path, config)
    if missing:
        raise ValueError(
            f"{path!r} lacks the weights {missing[:3]} of a sequence classifier: it was saved without them"
        )
    if model.config.num_labels != 1:
        raise ValueError(f"{path!r} has {model.config.num_labels} labels, and a reward model has one: its score")
    if not hasattr(model, "score"):
        raise ValueError(f"{path!r} is a {type(model).__name__}: only decoders are scored, at their last token")
    # Else the last token that is no padding by its id is looked for: the wrong one if the end is padded with itself.
    model.config.get_text_config().pad_token_id = -1
    classifier: nn.Module = model.requires_grad_(False)
    return classifier


def device_of(config: ModelConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def save_model(model: Any, directory: Path, state: dict[str, Tensor]) -> None:
    """As Hugging Face reads it, of its whole tensors; of an adapted model merged, with the adapter beside it."""
    if is_adapted(model):
        save_adapter(
            adapter_of(directory),
            {name: state[name] for name in trained(model)},
            model.lora_config,
            base=model.config.name_or_path,
            base_checksum=checksum(model, state),
        )
    model.save_pretrained(directory, state_dict=merged(model, state))


def restore(model: nn.Module, directory: Path) -> None:
    """What :func:`save_model` wrote, into a model that is already built; of an adapted one its adapter."""
    if is_adapted(model):
        load_adapter(model, adapter_of(directory))
        check_base(model, adapter_of(directory), model.state_dict())
        return
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    state = model.state_dict()
    given = {state[name].data_ptr() for name in tensors if name in state}
    lost = [name for name in missing if state[name].data_ptr() not in given]  # a tied weight is stored once
    if lost or unexpected:
        raise ValueError(f"{directory} does not fit the model: lacks {lost[:3]}, has unknown {list(unexpected)[:3]}")


def adapter_of(directory: Path) -> Path:
    """Where the adapter of a saved model is."""
    return directory.with_name(f"{directory.name}_adapter")


def token_budget(config: ModelConfig, model: nn.Module, longest: int) -> int:
    """Tokens of a micro-batch: on a CPU, if nobody says, as many as have activations that its cache holds."""
    if config.max_tokens_per_micro_batch is not None:
        return config.max_tokens_per_micro_batch
    width: int = model.config.get_text_config().hidden_size  # type: ignore[union-attr,operator]
    on_cpu = next(model.parameters()).device.type == "cpu"
    return max(longest, 2**19 // width if on_cpu else 16384)


def response_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B, T, V): what the model says of each response token before it sees it."""
    keep = batch["responses"].shape[1] + 1
    logits: Tensor = model(**_inputs(batch), use_cache=False, logits_to_keep=keep).logits
    return logits[:, -keep:-1]


def response_values(critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B, T): the value of the state in which each response token was sampled."""
    keep = batch["responses"].shape[1] + 1
    values: Tensor = critic(**_inputs(batch), use_cache=False).logits
    return values[:, -keep:-1, 0]


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    attention = batch["attention_mask"].long()
    return {
        "input_ids": torch.cat([batch["prompts"], batch["responses"]], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }


def trimmed(batch: dict[str, Tensor], rows: Iterable[int]) -> dict[str, Tensor]:
    """Some rows without the columns that are padding in all of them."""
    index = torch.tensor(list(rows), device=batch["responses"].device)
    part = {name: tensor[index] for name, tensor in batch.items()}
    width = part["prompts"].shape[1]
    attention = part["attention_mask"]
    used_prompt = int(attention[:, :width].sum(-1).max())
    used_response = max(1, int(attention[:, width:].sum(-1).max()))
    columns = slice(width - used_prompt, width + used_response)
    return {
        name: tensor[:, columns]
        if name == "attention_mask"
        else tensor[:, width - used_prompt :]
        if name == "prompts"
        else tensor[:, :used_response]
        if tensor.dim() == 2
        else tensor
        for name, tensor in part.items()
    }
