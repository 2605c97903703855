"""The model, tokenizer, prompts and reward of the trainer's benchmark: made here, nothing is downloaded."""

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

_FIRST = 0x4E00  # characters without a meaning here: one is one token


def tokenizer(vocabulary: int) -> Any:
    words = ["<pad>", "<eos>", *(chr(_FIRST + i) for i in range(vocabulary - 2))]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    model.pre_tokenizer = Split(Regex("."), behavior="isolated")
    model.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def save_model(directory: Path, *, vocabulary: int, window: int, p_end: float, kv_heads: int = 4) -> Path:
    """A random Qwen2 of two layers of width 128 that ends a response with about ``p_end`` at each token.

    One coordinate of the residual stream is the same for all tokens, and the end's logit reads it alone.
    """
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    end = math.log(max(p_end, 1e-12) * (vocabulary - 2))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[:2] = 0.0
        probe = model.model(torch.arange(2, min(vocabulary, 66))[None]).last_hidden_state[0, :, 0].mean()
        model.lm_head.weight[0, 0] = -30 / probe
        model.lm_head.weight[1, 0] = end / probe
    model.save_pretrained(directory)
    tokenizer(vocabulary).save_pretrained(directory)
    return directory


def prompts(count: int, length: int, vocabulary: int) -> list[str]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary - 2, (count, length), generator=random)
    return ["".join(chr(_FIRST + i) for i in row) for row in ids.tolist()]


def even_share(response: str, answer: str = "") -> float:
    """The share of the response's characters that have an even number: a reward that is never constant."""
    return sum(ord(c) % 2 == 0 for c in response) / max(1, len(response))
