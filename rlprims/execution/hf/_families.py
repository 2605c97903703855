"""What the code here can do with the models of transformers, by ``model_type``. docs/models.md is written from it.

:data:`PACKED_MODELS` and the like name what the tests have shown; other types are padded, with their own logits.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlprims.execution import ModelConfig


def _types(names: str) -> tuple[str, ...]:
    return tuple(names.split())


PACKED_MODELS = _types("""afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet cohere cohere2
cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone
exaone4 exaone_moe flex_olmo flint gemma gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama
longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat
olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3
solar_open starcoder2 youtu""")
"""The tests compare packed log-probs and gradients with those of each row alone."""
_OTHER_HEADS = _types("cohere cohere2 cohere2_moe ctrl minicpm3 modernbert-decoder phi")
FUSED_HEAD_MODELS = (
    *(kind for kind in PACKED_MODELS if kind not in _OTHER_HEADS),
    *_types("""bailing_hybrid bamba bloom falcon falcon_h1 falcon_mamba gemma2 gpt_neo granitemoehybrid
    inkling2_loop_text inkling2_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax mpt nemotron
    nemotron_h olmo_hybrid phimoe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text stablelm vaultgemma zamba
    zamba2 zaya"""),
)
"""Logits = last hidden states times the head's weight, optionally with a soft cap."""
SHARDED_MODELS = _types("""arcee bamba bitnet cohere cohere2 cwm dbrx diffllama ernie4_5 exaone4 falcon falcon_h1
falcon_mamba gemma gemma2 gemma3_text gemma3n_text glm glm4 gpt2 gpt_oss granite granite_swa granitemoe_swa helium
hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 jetmoe lfm2 llama mamba mamba2 minicpm3 ministral ministral3
mistral nanochat nemotron olmo olmo2 olmo3 opt phi phi3 qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm starcoder2
vaultgemma youtu zamba2""")
"""The files store parameters under their own names, so that a rank can read its parts."""
TENSOR_PARALLEL_MODELS = _types("""cohere gemma gemma2 gemma3_text gpt_neox granite llama mistral olmo2 phi phi3 qwen2
qwen3 smollm3 starcoder2""")
"""The tests compare logits and gradients of a group of ranks that divide the layers with those of one process."""
ROUTED_MODELS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""The tests compare recorded and replayed experts. Gates: a softmax of the logits of all experts or of the chosen."""
NOT_SAMPLED = _types("inkling_text openai-gpt qwen4_exp_text xlm xlnet")
"""The local sampler does not have the numbers of a row alone."""
VISION_MODELS = _types("""gemma3 gemma4 glm4v idefics3 internvl llava mistral3 qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe
qwen3_vl qwen3_vl_moe smolvlm""")
"""The tests compare rows with images in a batch, and sampled ones, with each alone, and the gradient of one."""
TIME_STEP_FLOOR = ("nemotron_h", "zamba2")
"""transformers has a floor of their time steps where it reads many tokens, and none where it reads one."""
ONE_LENGTH = ("minimax",)
"""Types that attend to the padding of a prompt when they read a new token: prompts of other lengths are read apart."""

_REASONS = {
    "it reads padding as tokens": "recurrent_gemma rwkv",
    "its positions count padding": """bart bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text llama4
        llama4_text marian mbart mvp pegasus plbart roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod""",
    "its sparse attention counts padding": """axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4
        minimax_m3_vl_text""",
    "it gives logits for every token alone": "prophetnet xlstm",
    "it reads more than tokens": "blt cpmant gemma4_assistant gemma4_unified_assistant",
    "it has gradients in training mode alone": "reformer",
    "it is multimodal": """emu3 git got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody
        phi4_multimodal trocr whisper""",
}
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
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
