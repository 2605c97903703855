"""What the code here can do with the models of transformers, by ``model_type``. docs/models.md is written from it.

:data:`PACKED_MODELS` and the like name what the tests have shown; other types are padded, with their own logits.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlprims._json import beside
from rlprims.execution import ModelConfig

_TYPES = beside(__file__, "_families.json")

PACKED_MODELS: tuple[str, ...] = tuple(_TYPES["packed"])
"""The tests compare packed log-probs and gradients with those of each row alone."""
FUSED_HEAD_MODELS: tuple[str, ...] = (
    *(kind for kind in PACKED_MODELS if kind not in _TYPES["packed, with another head"]),
    *_TYPES["fused head, not packed"],
)
"""Logits = last hidden states times the head's weight, optionally with a soft cap."""
SHARDED_MODELS: tuple[str, ...] = tuple(_TYPES["read in shards"])
"""The files store parameters under their own names, so that a rank can read its parts."""
TENSOR_PARALLEL_MODELS: tuple[str, ...] = tuple(_TYPES["tensor parallel"])
"""The tests compare logits and gradients of a group of ranks that divide the layers with those of one process."""
ROUTED_MODELS: tuple[str, ...] = tuple(_TYPES["routed"])
"""The tests compare recorded and replayed experts. Gates: a softmax of the logits of all experts or of the chosen."""
NOT_SAMPLED: tuple[str, ...] = tuple(_TYPES["not sampled"])
"""The local sampler does not have the numbers of a row alone."""
VISION_MODELS: tuple[str, ...] = tuple(_TYPES["vision"])
"""The tests compare rows with images in a batch, and sampled ones, with each alone, and the gradient of one."""
TIME_STEP_FLOOR: tuple[str, ...] = tuple(_TYPES["time step floor"])
"""transformers has a floor of their time steps where it reads many tokens, and none where it reads one."""
ONE_LENGTH: tuple[str, ...] = tuple(_TYPES["one length"])
"""Types that attend to the padding of a prompt when they read a new token: prompts of other lengths are read apart."""
REFUSED: dict[str, str] = {kind: reason for reason, kinds in _TYPES["refused"].items() for kind in kinds}
"""Why the rows of a type have other numbers in a padded batch than alone. All other types are padded rightly."""


def check_type(settings: Any, *, vision: bool = True) -> None:
    """Raise an error if a model with this config is refused, as one of :data:`REFUSED` or a multimodal one.

    ``vision``: one of :data:`VISION_MODELS` is not.
    """
    text, kind = settings.get_text_config(), settings.model_type
    reason = REFUSED.get(kind) or REFUSED.get(text.model_type)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | (VISION_MODELS if vision else ())
    if reason is None and text is not settings and kind not in known:
        reason = "it is multimodal, and transformers does not load it as a causal language model"
        if kind in VISION_MODELS:
            reason += "; execution: local does with model.vision: frozen"
    if reason is not None:
        raise ValueError(f"a {kind} is refused: {reason}; set model.path to one of another type, see docs/models.md")


def sees(model: ModelConfig, settings: Any = None) -> bool:
    """Whether a model, or one with its ``settings``, is loaded with the part that reads images."""
    settings = settings or AutoConfig.from_pretrained(model.path)
    return model.vision != "none" and settings.model_type in VISION_MODELS


def auto_class(model: ModelConfig, settings: Any = None) -> Any:
    """The class of transformers that loads a language model, with the part that reads images or without it."""
    return AutoModelForImageTextToText if sees(model, settings) else AutoModelForCausalLM


def why_padded(settings: Any, model: ModelConfig | None = None) -> str | None:
    """Why the attention of a model with this config cannot be packed; None: it can be."""
    text = settings.get_text_config()
    if model is not None and sees(model, settings):
        return (
            f"a {settings.model_type} is padded: no test packs rows with images; for texts alone set model.vision: none"
        )
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return f"a {text.model_type} is padded: its attention has a soft cap"
    return None if text.model_type in PACKED_MODELS else f"a {text.model_type} is padded: no test packs this type"


def check_sampled(model: Any) -> None:
    """Raise an error if the local sampler has other numbers than a row alone."""
    kind = model.config.get_text_config().model_type
    if kind in NOT_SAMPLED:
        raise ValueError(f"the local sampler does not have a {kind}: set execution: ray, if vLLM has this type")


def packs(model: ModelConfig, settings: Any = None) -> bool:
    """Whether a model is to be packed: as ``model.packing`` says, or if one with its ``settings`` can be."""
    if model.packing is not None:
        return model.packing
    settings = settings or AutoConfig.from_pretrained(model.path)
    return model.attention in (None, "sdpa") and why_padded(settings, model) is None


def without_data(auto: Any, path: str) -> Any:
    """A model of this class with parameters that have shapes but no data, from its config alone."""
    try:
        with torch.device("meta"):
            return auto.from_config(AutoConfig.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load {path!r}: {str(error).splitlines()[0]}") from None
