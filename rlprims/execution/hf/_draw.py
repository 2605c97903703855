"""The draw of vLLM 0.32's GPU model runner (V2), in torch: Gumbel noise that is a hash of (seed, position, token).

The argmax of logits plus noise is a draw from their softmax (Gumbel-max). The noise has no state: a sample is the same
in any batch and order, after a crash, and in an engine. The hash is MurmurHash3 (x86, 32 bits)
of four words: the low and the high word of the seed, the position, the token.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

_AT_ONCE = {"cpu": 2**16}
"""The number of noise values that are computed at once; on a CPU they fit into its cache."""


class Choice(NamedTuple):
    """The tokens that are drawn for B rows."""

    tokens: Tensor  # int64 (B,)
    log_probs: Tensor  # float32 (B,), of the distribution that was drawn from
    ends: Tensor  # bool (B,), whether it is a token that ends a response
    logits: Tensor  # float32 (B, V), those drawn from


def sample_seeds(seed: int, sample_ids: Sequence[int]) -> Tensor:
    """int64 (B,): the ``seed`` of the request for each sample of a run, 63 bits of a hash; vLLM's -1 is none.

    >>> sample_seeds(0, [0, 1]).tolist()
    [1576848291327681832, 9221934688551543782]
    """
    digests = [blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest() for sample in sample_ids]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 (B,): a token from the softmax of each row of float32 ``logits`` (B, V); one of -inf is never drawn.

    ``seeds`` are of :func:`sample_seeds`; ``positions`` those of the model's last input token, 0 for a prompt of one.
    """
    count, vocabulary = logits.shape
    rows = max(1, _AT_ONCE.get(logits.device.type, 2**26) // vocabulary)
    parts = [slice(i, i + rows) for i in range(0, max(1, count), rows)]
    return torch.cat([(logits[i] + gumbel(seeds[i], positions[i], vocabulary)).argmax(-1) for i in parts])


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """float32 (B, V): the noise of every token, -log(-log(1 - u)), with u in (0, 1) from the 32 bits of the hash."""
    h = torch.zeros_like(seeds, dtype=torch.int32)
    for word in (seeds, seeds >> 32, positions):
        h = _mixed(h, _scrambled(word.to(torch.int32)))  # the word's low 32 bits
    h = _mixed(h[:, None], _token_words(vocabulary, seeds.device))
    h = h ^ 16  # the length of what was hashed, in bytes
    h = (h ^ _shifted(h, 16)) * _signed(0x85EBCA6B)
    h = (h ^ _shifted(h, 13)) * _signed(0xC2B2AE35)
    h = h ^ _shifted(h, 16)
    u = _shifted(h, 16).float() * 2.0**-16 + ((h & 0xFFFF).float() + 0.5) * 2.0**-32
    # Large noise comes from small u, where float32 is fine; 1 - 2**-24 is the largest below 1.
    return -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24)))


def _mixed(h: Tensor, word: Tensor) -> Tensor:
    return _rotated(h ^ word, 13) * 5 + _signed(0xE6546B64)


def _scrambled(word: Tensor) -> Tensor:
    return _rotated(word * _signed(0xCC9E2D51), 15) * _signed(0x1B873593)


@lru_cache(maxsize=4)
def _token_words(vocabulary: int, device: torch.device) -> Tensor:
    return _scrambled(torch.arange(vocabulary, dtype=torch.int32, device=device))


def _rotated(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shifted(x, 32 - bits)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift the 32 bits to the right without a sign; torch has no arithmetic for unsigned integers."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - ((constant & 0x80000000) << 1)
