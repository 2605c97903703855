"""The model's processor renders messages and expands each image; a text with other placeholders is refused."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from rlprims.turns.tokens import Chat
from rlprims.vision.processor import load_processor, prompt
from tests.execution import vision_zoo
from tests.vision.made import BLUE, PATCHES, RED, model, tokenizer

IMAGE = {"type": "image"}


def asked(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def test_an_image_is_as_many_tokens_as_it_has_patches() -> None:
    processor, words = load_processor(str(model())), {"type": "text", "text": "How many dots?"}
    text, ids = prompt(processor, asked(words, IMAGE), (RED,))
    assert text == "How many dots?<image>"
    tokens = processor.tokenizer.convert_ids_to_tokens(ids)
    around = "<fake_token_around_image>"
    assert tokens == ["How", " many", " dots", "?", around, "<global-img>", *["<image>"] * PATCHES, around]
    both = prompt(processor, asked(IMAGE, words, IMAGE), (RED, BLUE))[1]
    assert both.count(processor.image_token_id) == 2 * PATCHES


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_ids_are_those_of_the_processor_of_transformers(kind: str, tmp_path) -> None:
    """Of every type; with the image given by its bytes, and by PIL."""
    folder = str(vision_zoo.save(kind, tmp_path))
    processor, data = load_processor(folder), vision_zoo.picture(0, 20, 12)
    template = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}"
    template = (template + "{% endif %}{% endfor %}{% endfor %}").replace("IMAGE", processor.image_token)
    messages = asked({"type": "text", "text": "ab"}, IMAGE, {"type": "text", "text": "c"})
    _, ids = prompt(processor, messages, (data,), None, {"chat_template": template})
    text = f"ab{processor.image_token}c"
    expected = processor(text=[text], images=[[vision_zoo.opened(data)]], return_tensors="pt", add_special_tokens=False)
    assert torch.equal(torch.tensor([ids]), expected["input_ids"])
    assert len(ids) > 4


@pytest.mark.parametrize("words", ["<image>", "a <image> b <image>"])
def test_placeholders_in_a_text_are_refused(words: str) -> None:
    processor = load_processor(str(model()))
    for images, parts in (((), []), ((RED,), [IMAGE])):
        found = words.count("<image>") + len(images)
        with pytest.raises(ValueError, match=rf"expected {len(images)} placeholders <image> .*, got {found}$"):
            prompt(processor, asked({"type": "text", "text": words}, *parts), images)


def test_what_the_processor_refuses_is_one_line() -> None:
    processor = load_processor(str(model()))
    with pytest.raises(ValueError, match=r"the model's processor refuses the images|expected") as found:
        prompt(processor, asked(IMAGE, IMAGE), (RED, b"no image"))
    assert "\n" not in str(found.value)


def test_a_model_without_a_processor_of_images(tmp_path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected a model with a processor of images, .* llama reads text alone"):
        load_processor(str(tmp_path))
    with pytest.raises(ValueError, match="expected a model with a processor of images") as found:
        load_processor("/there/is/none")
    assert "\n" not in str(found.value)


def test_a_template_that_writes_only_parts_gets_texts_as_parts() -> None:
    """Otherwise a prompt without images would be empty: templates of several models with vision skip plain texts."""
    messages = [{"role": "user", "content": "How many dots?"}]
    assert tokenizer().apply_chat_template(messages, tokenize=False) != "How many dots?"
    assert Chat(tokenizer()).text(messages) == "How many dots?"
    text = AutoTokenizer.from_pretrained(model())
    text.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools.type }}{% endif %}"
    assert Chat(text).text(messages) == "How many dots?"
