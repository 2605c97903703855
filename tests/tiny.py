"""A tiny random causal language model with its tokenizer, and questions for it: nothing is downloaded.

``save_model(tmp_path)`` writes a directory that every part of the library takes as ``model.path``.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, "<answer>", "</answer>", *"0123456789", *"+-= ?", *"abcdefghijkl")
"""32 tokens: a tag, or one character."""
PAD_ID, EOS_ID = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token is one character or tag, so decoding gives the same text back."""
    model = Tokenizer(WordLevel({token: number for number, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    model.pre_tokenizer = Split(Regex("</?[a-z]+>|."), behavior="isolated")
    model.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def config(**changes: Any) -> Qwen2Config:
    """75 thousand parameters in two layers, a window of 128 tokens."""
    settings: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # wide, so that the distributions are far from uniform
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }
    return Qwen2Config(**settings | changes)


def causal_lm(*, seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """Random weights, a function of the seed; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config(**changes))


def save_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Model and tokenizer, as ``from_pretrained`` takes them."""
    causal_lm(seed=seed, **changes).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def save_mixture(directory: Path, kind: str = "qwen3_moe", *, seed: int = 0, **changes: Any) -> Path:
    """A mixture of eight experts, of that ``model_type``, in three layers."""
    settings = {
        **{name: value for name, value in config().to_dict().items() if name in _OF_MIXTURES},
        "num_hidden_layers": 3,
        "moe_intermediate_size": 16,
        "num_local_experts" if kind == "mixtral" else "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    if kind == "qwen2_moe":  # vLLM would give a Qwen3 with this setting shared experts, too
        settings["shared_expert_intermediate_size"] = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | changes)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


_OF_MIXTURES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "initializer_range", "pad_token_id", "eos_token_id", "bos_token_id"),
}


def save_classifier(directory: Path, *, seed: int = 0, labels: int = 1, **changes: Any) -> Path:
    """A random reward model with the tokenizer, as ``from_pretrained`` takes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForSequenceClassification(config(num_labels=labels, **changes)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(count: int) -> list[dict[str, str]]:
    """Questions such as 3+4= with their answers, each different up to a hundred."""
    pairs = [(i // 10 % 10, i % 10) for i in range(count)]
    return [{"question": f"{a}+{b}=", "answer": str(a + b), "data_source": "sums"} for a, b in pairs]
