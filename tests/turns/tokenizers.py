"""Sixteen small tokenizers of the kinds in use, built here: nothing is downloaded."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.turns.chat_templates import CORPUS, SPECIAL

ALPHABET = sorted({chr(c) for c in range(33, 127)} | {" ", "\n"})
TEXTS = [*CORPUS, "QXZJ QX ZJ XQ. ZZ, JQ! 12 345 67 890.\n\nuser assistant\n", "".join(ALPHABET)]
GPT_4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BOS, EOS = "<s>", "</s>"


def _bpe(**options: Any) -> tuple[Any, Any]:
    model = Tokenizer(models.BPE(unk_token="<unk>", **options))
    return model, trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", *SPECIAL], initial_alphabet=ALPHABET, show_progress=False
    )


def _byte_level(*before: Any, prefix: bool = False) -> Any:
    model = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not before)
    model.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        TEXTS * 8,
        trainers.BpeTrainer(
            vocab_size=460, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return model


def _metaspace(scheme: str) -> Any:
    model, trainer = _bpe()
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    model.decoder = decoders.Metaspace(prepend_scheme=scheme)
    model.train_from_iterator(TEXTS * 8, trainer)
    return model


def _llama_2() -> Any:
    """A normalizer writes the space, there is no pre-tokenizer, and unknown characters become bytes."""
    model, trainer = _bpe(byte_fallback=True, fuse_unk=True)
    model.normalizer = normalizers.Replace(" ", "▁")
    model.train_from_iterator([text.replace("\n", " \n ") for text in TEXTS * 8], trainer)
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return model


def _unigram(scheme: str) -> Any:
    model = Tokenizer(models.Unigram())
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    model.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", *SPECIAL],
        unk_token="<unk>",
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    model.train_from_iterator(TEXTS * 8, trainer)
    return model


def _word_piece() -> Any:
    model = Tokenizer(models.WordPiece(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL], initial_alphabet=ALPHABET, show_progress=False
    )
    model.train_from_iterator(TEXTS * 8, trainer)
    return model


def _characters() -> Any:
    vocabulary = {token: number for number, token in enumerate(["<unk>", *SPECIAL, *ALPHABET])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    model.decoder = decoders.Fuse()
    return model


def _framed(make: Callable[[], Any], begin: str = "", end: str = "") -> Any:
    """With a post-processor that adds tokens at the beginning and the end of a text."""
    model = make()
    single = " ".join(part for part in (begin, "$A", end) if part)
    special = [(token, model.token_to_id(token)) for token in (begin, end) if token]
    model.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return model


def _normalized() -> Any:
    model = _byte_level()
    model.normalizer = normalizers.NFC()
    return model


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": _byte_level,
    "byte-level, pattern of GPT-4": lambda: _byte_level(pre_tokenizers.Split(Regex(GPT_4), "isolated")),
    "byte-level, prefix space": lambda: _byte_level(prefix=True),
    "byte-level, NFC": _normalized,
    "byte-level, BOS": lambda: _framed(_byte_level, BOS),
    "byte-level, BOS and EOS": lambda: _framed(_byte_level, BOS, EOS),
    "metaspace, first": lambda: _metaspace("first"),
    "metaspace, always": lambda: _metaspace("always"),
    "metaspace, never": lambda: _metaspace("never"),
    "metaspace, first, BOS": lambda: _framed(lambda: _metaspace("first"), BOS),
    "prepend": _llama_2,
    "prepend, BOS": lambda: _framed(_llama_2, BOS),
    "word piece, CLS and SEP": lambda: _framed(_word_piece, BOS, EOS),
    "unigram, always": lambda: _unigram("always"),
    "unigram, never, EOS": lambda: _framed(lambda: _unigram("never"), "", EOS),
    "characters": _characters,
}
"""By name, without a template."""


@cache
def _trained(name: str) -> Any:
    model = TOKENIZERS[name]()
    model.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return model


def tokenizer(name: str, template: str | None = None, end: str = EOS) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template; ``end`` is its end of a sequence."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=_trained(name),
        bos_token=BOS,
        eos_token=end,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped
