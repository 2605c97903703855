"""A tokenizer for the words task, built in memory: nothing is trained and nothing is downloaded.

One token is a word with the space before it, a single digit, a tag, or any other single character of the task. The
tokens are exactly the pieces of the text, so decoding puts the same text back together, character for character.
Numbers are spelled digit by digit, so that a tiny model can learn to add.

The tags are ordinary vocabulary entries, not special tokens. A verifier has to see `<answer>` in the decoded text,
and decoding with `skip_special_tokens=True` removes special tokens.
"""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from words import NAMES, THINGS, VERBS

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PIECE = Regex(r"</?[a-z]+>| ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]")


def vocabulary() -> dict[str, int]:
    """Every token of the task and its id; the special ones come first."""
    verbs = [verb for group in VERBS.values() for verb in group]
    first_words = sorted(NAMES)  # a question begins with a name: the only words without a space before them
    other_words = sorted({*NAMES, *THINGS, *verbs, "has", "them", "How", "many"})
    tokens = [PAD, EOS, UNKNOWN, *TAGS, *"0123456789", *"+-*=,~.? "]
    tokens += first_words + [f" {word}" for word in other_words]
    return {token: number for number, token in enumerate(tokens)}


def build_tokenizer(max_length: int, more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The tokenizer as a Hugging Face object, ready for `save_pretrained` and for batched generation.

    `more` are tokens of a task that needs others beside these.
    """
    known = vocabulary()
    known |= {token: len(known) + i for i, token in enumerate(more)}
    tokenizer = Tokenizer(WordLevel(known, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(PIECE, behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",  # prompts of different lengths then all end where generation starts
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,  # the text must come back exactly, spaces included
    )
