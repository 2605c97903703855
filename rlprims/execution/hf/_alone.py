"""What must hold so that a row has the numbers in a batch that it has alone."""

from typing import Any

from torch import Tensor, nn


def window_of(config: Any) -> int:
    """The most tokens of a row: the model's window, or less with a rotary embedding of type ``longrope``.

    transformers chooses its frequencies by the longest row of a batch: others beyond the model's original window. A
    row that is sampled across that border had the first ones before it, so its log-probs are those of no forward pass.
    vLLM chooses by its own window; with this one both agree.
    """
    text = config.get_text_config()
    borders = [rope["original_max_position_embeddings"] for rope in _by_length(text) if "long_factor" in rope]
    return int(min([getattr(text, "max_position_embeddings", None) or 2**31 - 2, *borders]))


def check_lengths(config: Any, lengths: Tensor) -> None:
    """Raise an error if a row is longer than the window and its rotary embedding depends on the batch."""
    ropes, window = _by_length(config.get_text_config()), window_of(config)
    if ropes and (longest := int(lengths.max())) > window:
        raise ValueError(
            f"expected rows of at most {window} tokens, got {longest}: a {ropes[0]['rope_type']} rope beyond depends "
            "on the other rows of a batch. Lower sampling.max_new_tokens or data.max_prompt_length"
        )


def _by_length(text: Any) -> list[dict[str, Any]]:
    """The settings of the rotary embeddings, one or one for each type of layer, that depend on the longest row."""
    ropes = getattr(text, "rope_parameters", None) or {}
    each = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    return [r for r in each if r.get("rope_type") == "dynamic" or r.get("long_factor") != r.get("short_factor")]


def check_padding(model: nn.Module) -> None:
    """Raise an error if padding enters a convolution: transformers sets its input to 0, and then a bias is added."""
    for name, module in model.named_modules():
        parts = dict(module.named_children())
        if {"conv", "conv1d"} & parts.keys() and getattr(parts.get("in_proj"), "bias", None) is not None:
            raise ValueError(f"expected padding to leave no state: the bias of {name}.in_proj makes one of it")
