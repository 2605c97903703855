"""The tokenizer and the processor of the dots task, built in memory: nothing is trained and nothing is downloaded.

One token is a word with the space before it, a digit, or a tag. The processor is Idefics3's, which SmolVLM has too: it
makes of an image its pixels, and of the placeholder `<image>` in a text as many tokens as the image has patches.
"""

import re

from dots import CELLS, COLOURS, MOST, PLACES, QUESTIONS, SIDE
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import Idefics3ImageProcessorPil, Idefics3Processor, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<end_of_utterance>", "<unk>"
AROUND, IMAGE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"  # Idefics3's own names
SPECIAL = (PAD, EOS, UNKNOWN, AROUND, IMAGE, WHOLE)
TAGS = ("<answer>", "</answer>")
PIECE = Regex(r"<[^<>]+>| ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]")
PATCHES = CELLS**2  # of an image: a cell is a patch
TEMPLATE = """{%- for message in messages %}{% for part in message.content -%}
{% if part.type == "image" %}<image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% if message.role == "assistant" %}<end_of_utterance>{% endif %}{% endfor -%}"""


def vocabulary() -> dict[str, int]:
    """Every token of the task and its id; the special ones come first."""
    texts = [*QUESTIONS.values(), *PLACES, *COLOURS]
    words = sorted({word for text in texts for word in re.findall(r" ?[A-Za-z]+", text)})
    tokens = [*SPECIAL, *TAGS, *map(str, range(MOST + 1)), "?", *words]
    return {token: number for number, token in enumerate(tokens)}


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(PIECE, behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[AROUND, IMAGE, WHOLE],
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_processor(max_length: int) -> Idefics3Processor:
    """The processor as a Hugging Face object, ready for `save_pretrained`. It leaves pictures of `SIDE` as they are."""
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    tokenizer = build_tokenizer(max_length)
    return Idefics3Processor(images, tokenizer, image_seq_len=PATCHES, chat_template=TEMPLATE)
