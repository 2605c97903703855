"""Prompts with images for vLLM, which expands one placeholder for each image to the tokens of the rows."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vllm import LLM, TokensPrompt

from rlprims.vision.images import decode
from rlprims.vision.processor import collapsed, load_processor

_KEPT = 256
"""Decoded images that are kept: the samples of a group have the same."""


class Pictures:
    """Makes the inputs of an engine from expanded prompts and encoded images."""

    def __init__(self, llm: LLM, path: str) -> None:
        self.renderer, self.processor = llm.llm_engine.renderer, load_processor(path)
        self.placeholder = self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token)
        self._read = lru_cache(_KEPT)(self._decoded)

    def __call__(self, tokens: list[int], images: Sequence[bytes], cache_salt: str) -> Any:
        pictures, blocks = zip(*map(self._read, images), strict=True)
        ids = collapsed(tokens, blocks, self.placeholder)
        prompt = TokensPrompt(prompt_token_ids=ids, multi_modal_data={"image": [*pictures]}, cache_salt=cache_salt)
        (given,) = self.renderer.render_cmpl([prompt])
        if (got := given["prompt_token_ids"]) != tokens:
            count = len(tokens)
            raise ValueError(f"images: expected the {count} tokens of prompt_ids from vLLM's processor, got {len(got)}")
        return given

    def _decoded(self, image: bytes) -> tuple[Any, list[int]]:
        """The image, and the tokens to which its placeholder is expanded."""
        picture = decode(image)
        read = self.processor(text=[self.processor.image_token], images=[[picture]], add_special_tokens=False)
        return picture, [int(token) for token in read["input_ids"][0]]
