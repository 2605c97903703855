"""Groups of single responses."""

from collections.abc import Sequence
from typing import Any

import torch

from rlprims.data_proto import DataProto
from rlprims.execution import Stream
from rlprims.trainer.data import Example
from rlprims.trainer.sources.group import Group, example_columns


class Responses:
    """A source of groups of responses. Each group is one part of a stream of an execution."""

    def __init__(self, stream: Stream, tokenizer: Any, *, has_images: bool = False) -> None:
        self.stream, self.has_images = stream.__enter__(), has_images
        self.tokenizer = tokenizer
        self._numbers: dict[int, int] = {}  # the numbers of groups, by the numbers of their parts

    def begin(self, group: Group) -> None:
        how = {"copies": len(group.samples), "first_sample": group.samples.start}
        rows = prompt_rows([group.example], [group.number], **how, has_images=self.has_images)
        self._numbers[self.stream.submit(rows)] = group.number

    def take(self) -> dict[int, DataProto]:
        return {self._numbers.pop(part): with_texts(self.tokenizer, rows) for part, rows in self.stream.take().items()}

    def close(self) -> None:
        self.stream.__exit__(None, None, None)


def prompt_rows(
    examples: Sequence[Example], groups: Sequence[int], *, copies: int, first_sample: int, has_images: bool = False
) -> DataProto:
    """The rows of prompts, each example ``copies`` times in a row; samples are numbered from ``first_sample``."""
    repeated = [example for example in examples for _ in range(copies)]
    return DataProto.from_dict(
        tensors={
            "sample_id": torch.arange(first_sample, first_sample + len(repeated)),
            "group": torch.tensor(list(groups), dtype=torch.int64).repeat_interleave(copies),
        },
        non_tensors={
            "prompt": [example.prompt for example in repeated],
            "prompt_ids": [example.prompt_ids for example in repeated],
            **example_columns(repeated),
            **({"images": [example.images for example in repeated]} if has_images else {}),
        },
    )


def with_texts(tokenizer: Any, sampled: DataProto) -> DataProto:
    """The rows with their responses as text."""
    pairs = zip(sampled["responses"], sampled["attention_mask"].bool()[:, sampled["prompts"].shape[1] :], strict=True)
    texts = [tokenizer.decode(tokens[mask], skip_special_tokens=True) for tokens, mask in pairs]
    return sampled.union(DataProto.from_dict(tensors={}, non_tensors={"response": texts}))
