"""Tiny random models that read images, with their processors, and pictures for them: nothing is downloaded."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from rlprims.vision.processor import _for_images
from tests import tiny

VOCABULARY = 96
SPECIAL = {
    **{"image_token": "<image>", "video_token": "<video>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    **{"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"},
    **{"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>"},
}
MORE = (
    "<begin>",
    "<end>",
    "<fake_token_around_image>",
    "<global-img>",
    "\n",
    *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
)
TEXT: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256},
    **{"initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    **{"final_logit_softcapping": None},
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
SEES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "initializer_range": 0.2}
QWEN = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_IMAGES = (
    "Qwen2VLImageProcessorPil",
    {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024},
)
IDEFICS_IMAGES = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text": {"rope_parameters": MROPE},
        "vision": {**QWEN, "embed_dim": 32},
        "images": QWEN_IMAGES,
    },
    "qwen2_5_vl": {
        "text": {"rope_parameters": MROPE},
        "vision": {
            **QWEN,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "images": QWEN_IMAGES,
    },
    "qwen3_vl": {
        "text": {"rope_parameters": MROPE},
        "vision": {
            **QWEN,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "images": QWEN_IMAGES,
    },
    "qwen3_5": {
        "text": {
            "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
            **LINEAR,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "vision": {**QWEN, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16},
        "images": QWEN_IMAGES,
    },
    "smolvlm": {
        "text": {"model_type": "llama"},
        "vision": {**SEES, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
        "images": ("SmolVLMImageProcessorPil", IDEFICS_IMAGES),
        "processor": {"image_seq_len": 4},
    },
    "idefics3": {
        "text": {"model_type": "llama"},
        "vision": {**SEES, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
        "images": ("Idefics3ImageProcessorPil", IDEFICS_IMAGES | {"size": {"longest_edge": 32}}),
        "processor": {"image_seq_len": 4},
    },
    "gemma3": {
        "text": {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
        },
        "vision": {**SEES, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
        "images": ("Gemma3ImageProcessorPil", {"size": {"height": 16, "width": 16}}),
        "processor": {"image_seq_length": 4},
        "config": {"mm_tokens_per_image": 4, "boi_token_index": "<boi>", "eoi_token_index": "<eoi>"},
    },
    "internvl": {
        "text": {"model_type": "qwen2"},
        "vision": {**SEES, "num_hidden_layers": 2, "image_size": [16, 16], "patch_size": [4, 4]},
        "images": (
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 16, "width": 16}, "max_patches": 4, "min_patches": 1},
        ),
        "processor": {"image_seq_length": 4},
    },
    "gemma4": {
        "text": {
            **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "global_head_dim": 16},
            **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
            **{"use_bidirectional_attention": "vision", "max_position_embeddings": 1024},
        },
        "vision": {
            **{**SEES, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "patch_size": 4},
            **{"global_head_dim": 16, "position_embedding_size": 64, "pooling_kernel_size": 2},
        },
        "images": ("Gemma4ImageProcessorPil", {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}),
        "config": {"audio_config": None, "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"},
    },
    "mistral3": {
        "text": {"model_type": "mistral", "sliding_window": None},
        "vision": {
            **SEES,
            "model_type": "pixtral",
            "num_hidden_layers": 2,
            "head_dim": 16,
            "image_size": 32,
            "patch_size": 4,
        },
        "images": ("PixtralImageProcessorPil", {"size": {"longest_edge": 32}, "patch_size": 4}),
        "processor": {
            "patch_size": 4,
            "spatial_merge_size": 2,
            "image_token": "<image>",
            "image_break_token": "<begin>",
            "image_end_token": "<end>",
        },
    },
    "qwen3_vl_moe": {
        "text": {"rope_parameters": MROPE, **EXPERTS},
        "vision": {
            **{**QWEN, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16},
            **{"deepstack_visual_indexes": [0]},
        },
        "images": QWEN_IMAGES,
    },
    "qwen3_5_moe": {
        "text": {
            **{"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}, **LINEAR, **EXPERTS},
            **{"layer_types": ["linear_attention", "full_attention"]},
        },
        "vision": {**QWEN, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16},
        "images": QWEN_IMAGES,
    },
    "glm4v": {
        "text": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        "vision": {**QWEN, "intermediate_size": 48, "out_hidden_size": 32, "image_size": 32},
        "images": (
            "Glm4vImageProcessorPil",
            {
                "patch_size": 4,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "size": {"shortest_edge": 128, "longest_edge": 2048},
            },
        ),
    },
    "llava": {
        "text": {"model_type": "llama"},
        "vision": {
            **SEES,
            "model_type": "clip_vision_model",
            "num_hidden_layers": 2,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 32,
        },
        "images": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
        "processor": {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
}


NEED_TORCHVISION = ("gemma4", "mistral3")
"""Their processors are not in transformers without it."""
KINDS = [kind for kind in MODELS if kind not in NEED_TORCHVISION or find_spec("torchvision")]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token is one character, or a placeholder."""
    plain = tiny.tokenizer()
    plain.add_special_tokens({"additional_special_tokens": [*dict.fromkeys(SPECIAL.values()), *MORE]})
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=tiny.PAD,
        eos_token=tiny.EOS,
        unk_token=tiny.UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=SPECIAL,
    )


def save(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """A random model of that ``model_type`` with its processor. Norms and biases are random too, so that they count."""
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # it writes numbers of videos
    how, tokens = MODELS[kind], tokenizer()
    ids = {
        name: tokens.convert_tokens_to_ids(value) if isinstance(value, str) else value
        for name, value in how.get("config", {}).items()
    }
    cls = transformers.CONFIG_MAPPING[kind]
    for name, token in (("image_token_id", "<image>"), ("video_token_id", "<video>"), ("image_token_index", "<image>")):
        if name in {x for base in cls.__mro__ for x in getattr(base, "__annotations__", {})}:
            ids[name] = tokens.convert_tokens_to_ids(token)
    config = cls(
        text_config=TEXT | how["text"],
        vision_config=how["vision"],
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1 or not parameter.any():
                    parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(folder)
    name, settings = how["images"]
    tokens.save_pretrained(folder)
    images = getattr(transformers, name)(**settings)
    of_all = transformers.models.auto.processing_auto.PROCESSOR_MAPPING[type(config)]
    cls = _for_images(of_all)
    arguments = {
        n: {"image_processor": images, "tokenizer": tokens, "feature_extractor": _sounds(kind)}.get(n)
        for n in of_all.get_attributes()
    }
    cls(**arguments, **how.get("processor", {})).save_pretrained(folder)
    return folder


def _sounds(kind: str) -> Any:
    return transformers.Gemma4AudioFeatureExtractor() if kind == "gemma4" else None


def picture(number: int, width: int, height: int) -> bytes:
    """A PNG of random pixels."""
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8
    )
    encoded = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(encoded, "PNG")
    return encoded.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")
