"""Models that read images: their settings, the part that sees, and what the images of rows are for a forward pass.

Row i of the object column ``images`` is a tuple of encoded images, whose placeholders are among the prompt's tokens.
"""

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.utils import cached_file

from rlprims.algorithms import Algorithm
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf._families import VISION_MODELS, sees, without_data

if TYPE_CHECKING:
    from rlprims.vision.inputs import Reader

IMAGES, INPUTS = "images", "image_inputs"
"""The column of a batch, and what :func:`image_inputs` gives, in a micro-batch."""

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")


def tower(model: Any) -> dict[str, nn.Parameter]:
    """The parameters beside the language model and below a head, by name; none for a type without vision."""
    if getattr(getattr(model, "config", None), "model_type", None) not in VISION_MODELS:
        return {}
    seeing = {id(x) for x in model.base_model.parameters()} - {id(x) for x in model.get_decoder().parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in seeing}


def freeze(model: nn.Module, config: ModelConfig) -> nn.Module:
    """The model, whose part that sees is trained only if the config says so."""
    for parameter in tower(model).values():
        parameter.requires_grad_(config.vision == "trained")
    return model


def give_gradients(model: Any) -> None:
    """Give the part that sees the gradient 0 for rows without images: ranks sum the same gradients."""

    def with_all(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + 0 * sum(x.flatten()[0] for x in tower(model).values())

    model.get_input_embeddings().register_forward_hook(with_all)


def ban_placeholders(model: nn.Module) -> None:
    """Give the placeholders of images the probability 0: a row with a sampled one would lack its image."""
    ids = torch.tensor(placeholders(model.config), dtype=torch.int64, device=next(model.parameters()).device)

    def without(module: nn.Module, inputs: Any, output: Any) -> None:
        output.logits.index_fill_(-1, ids, -torch.inf)

    model.register_forward_hook(without)


def placeholders(settings: Any) -> list[int]:
    """The tokens that stand for images and videos and that the head has a logit for."""
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    ids = {getattr(settings, name, None) for name in names}
    return sorted(i for i in ids if i is not None and i < settings.get_text_config().vocab_size)


def check_vision(model: ModelConfig, algorithm: Algorithm | None = None) -> None:
    """Raise an error for a setting that no test has with a model that reads images."""
    needs_critic = algorithm is not None and "values" in algorithm.needs
    refused = {
        "model.packing: true": (bool(model.packing), "leave it out"),
        "model.fused_head: true": (model.fused_head, "set it to false"),
        "model.replay_routes: true": (model.replay_routes, "set it to false"),
        "model.router_aux_loss_coef": (model.router_aux_loss_coef > 0, "set it to 0"),
        "a critic": (needs_critic, "use an algorithm without values"),
        "model.teacher on a server": (model.teacher_url is not None, "use a model that is loaded here"),
        "model.reward without model.reward_template": (
            model.reward is not None and model.reward_template is None,
            "set the template: the reward model reads the text alone",
        ),
    }
    for what, (is_set, fix) in refused.items():
        if is_set:
            raise ValueError(f"{what}: not yet with a model that reads images: {fix}, or set model.vision: none")


def check_same_type(policy: Any, *others: Any) -> None:
    """Raise an error if a reference or a teacher does not read images as the policy does."""
    kind = policy.config.model_type
    for other in others:
        if other is not None and other.config.model_type != kind:
            raise ValueError(
                f"model.reference, model.teacher: expected a {kind} as model.path is, which reads images, got a "
                f"{other.config.model_type}: use another, or set model.vision: none"
            )


def with_rates(optimizer: OptimizerConfig, model: ModelConfig, policy: nn.Module) -> OptimizerConfig:
    """The optimizer's settings with ``model.vision_lr`` for the part that sees."""
    if model.vision_lr is None:
        return optimizer
    return optimizer.model_copy(update={"lr_of": {**optimizer.lr_of, **dict.fromkeys(tower(policy), model.vision_lr)}})


@lru_cache(maxsize=1)
def _reader_at(path: str) -> "Reader":
    from rlprims.vision.inputs import Reader
    from rlprims.vision.processor import load_processor

    return Reader(without_data(AutoModelForImageTextToText, path), load_processor(path))


def image_inputs(model: ModelConfig, images: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """The inputs for the images of rows besides tokens and mask (B, T); nothing without images."""
    if not any(row and isinstance(row[0], bytes) for row in images):
        return {}
    if not sees(model):
        raise ValueError(f"rows have images: expected a model that reads them, got {model.path!r}: see docs/vision.md")
    return _reader_at(model.path)(images, input_ids, attention_mask)


def pixels_of(model: ModelConfig, rows: Sequence[Sequence[bytes]]) -> float:
    """The count of numbers that the images of the mean row are, by the model's processor."""
    from rlprims.vision.inputs import pixel_inputs
    from rlprims.vision.processor import load_processor

    processor = load_processor(model.path) if any(rows) else None
    return sum(pixel_inputs(processor, row)["pixel_values"].numel() for row in rows if row) / len(rows)


def copy_processor(path: str, folder: Path) -> None:
    """Copy the files of a model's processor beside its weights."""
    for name in _FILES:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None and not (folder / name).exists():
            shutil.copy(found, folder / name)
