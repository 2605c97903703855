"""How a primitive is held to the laws. Each unit test of a primitive has its records, in ``RECORDS``."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlprims.types import SequenceShard, VocabShard


@dataclass(frozen=True)
class Record:
    """How one primitive is held to the laws.

    ``check`` by what kind of function it is, with the hyperparameters ``call``; ``matters`` are other values of them,
    each of which must change the result; ``exempt`` says by law why it does not bind.
    """

    name: str
    check: Callable[..., None]
    call: Mapping[str, Any] = field(default_factory=dict)
    matters: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)


def written_beside_the_tests_of(package: str) -> list[Record]:
    """``RECORDS`` of each file in ``tests/<package>``."""
    paths = sorted((Path(__file__).parent / package).glob("test_*.py"))
    modules = [f"tests.{package}.{path.stem}" for path in paths if "\nRECORDS = [" in path.read_text()]
    return [record for name in modules for record in importlib.import_module(name).RECORDS]


STATISTICS_OF_THE_BATCH = {
    "batches may be merged": "its statistics are those of the whole batch",
    "nan stays in its group": "its statistics are those of the whole batch",
}


def doubled(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks with the same batch."""
    return 2 * x


A_SHARD = VocabShard(0, 10**6, all_reduce=doubled, all_reduce_max=torch.clone)
"""Of two ranks with the same logits."""

BY_TOKEN = {"one advantage per response": "each token has its own return and its own baseline"}

FIRST_OF_TWO = SequenceShard(part=0, all_gather=lambda x: torch.stack([x, torch.ones_like(x)]))
"""The part before one whose recurrences begin with 1."""

SHARED_RATIO = {
    "on policy it is reinforce": "one ratio per response: its tokens share the mean of the advantages, not each its own"
}

DERIVATIVES = ("gradient is the derivative", "second derivative is right", "every second derivative is right")
"""The laws that compare with differences of values, or of gradients, which see through a constant."""

DETACHED_WEIGHT = dict.fromkeys(DERIVATIVES, "the weight is a constant by definition")

SCORE_FUNCTION = {"impossible tokens are finite": "linear in log_probs, which is infinite"}


def one_more(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce_rows of a rank beside one that has a token of log-ratio 1 in each sequence."""
    return x + 1


BY_SEGMENT = {"sequences may be cut": "segments of sequences that are cut are refused"}


def many_more(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of a rank beside one that has a thousand tokens above each threshold."""
    return x + 1000
