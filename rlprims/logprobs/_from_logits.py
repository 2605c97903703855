"""Log-probs of tokens, and entropies, from logits."""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from rlprims._described import described
from rlprims._sharding import check_vocab, columns_of, entries, max_over, sum_over
from rlprims.kernels import accelerated, are_readable
from rlprims.masking import check_logits, check_tensors, upcast
from rlprims.types import PerToken, SamplingSupport, VocabShard

LEAST_Z = -1000.0
"""exp of it is 0 even in float64. The entropy clamps z to it, so that p · z is 0 for a banned token (z = −inf)."""


class LogProbs(NamedTuple):
    """The log-prob of each token, and the entropy of the distribution that it was drawn from."""

    log_probs: PerToken
    entropies: PerToken


@accelerated(cpu="log_probs", cuda="log_probs", differentiable=True)
def log_probs_and_entropies(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None = None,
    with_entropies: bool = True,
    overwrite: bool = False,
    kept: SamplingSupport | None = None,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p of the tokens (..., K), and H = −Σ p log p of the rows (...) if requested.

    Computed in float32 (or float64 if given) for any dtype of the logits (..., V): bf16 would have an error of 0.05
    nats per token. The largest logit of a row is subtracted first, which changes no probability, so that
    1 <= Σ exp z <= V. A row whose largest logit is NaN or infinite has no distribution: it gives NaN and gradient 0.

    ``overwrite`` allows a kernel to write the gradient over the logits. Sums over V are over all shards of ``vocab``.
    """
    logits = upcast(logits)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if kept is not None:
        allowed = kept.allowed(logits.shape[-1], columns_of(vocab))
        logits = torch.where(allowed.reshape(logits.shape), logits, -torch.inf)
    largest = max_over(vocab, logits.detach().amax(-1, keepdim=True))
    z = torch.where(largest.isfinite(), (logits - largest) / temperature, torch.nan)
    weights = z.exp()
    total = sum_over(vocab, weights.sum(-1, keepdim=True))
    log_probs = entries(vocab, z, token_ids) - total.log()
    if not with_entropies:
        return log_probs, None
    mean_z = sum_over(vocab, (weights * z.clamp(min=LEAST_Z)).sum(-1, keepdim=True)) / total
    entropies = total.log() - mean_z
    return log_probs, entropies[..., 0]


@described
def from_logits(
    logits: Tensor,
    token_ids: Tensor,
    kept: SamplingSupport | None = None,
    *,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    vocab: VocabShard | None = None,
) -> Annotated[Tensor, "float, like token_ids"]:
    """Log-probability of the given tokens: log softmax(logits / temperature)[token].

    With ``kept`` it is that of the truncated policy that the sampler drew from, log π_K(a) = z_a − logsumexp_{v∈K} z_v
    with z = logits / temperature (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask"). Without it a
    sampler with top-k, top-p or min-p and a trainer of the same weights differ by log S, S = Σ_{v∈K} π_v.

    Computed in float32 for any dtype of the logits. Banned tokens (logit −inf) are allowed. Use the sampler's
    temperature, else the ratio is not 1 on policy. A row with NaN, or without a finite logit, gives NaN and gradient 0.

    Args:
        kept: the ids that each token was sampled from, for the N = B·T rows of logits; None: from the whole vocabulary.
            A token (...) outside its set is an error on a CPU outside transforms, elsewhere it has log-prob −inf.
        inplace_backward: if a kernel is used, the gradient overwrites the logits, and no second (..., V) is allocated.
            They must be no leaf, and must not be read after backward; torch raises if another backward does.
        vocab: if the logits are this rank's columns of the vocabulary; no kernel is used.

    Returns:
        float32 (or float64 if given) in nats, like token_ids.

    >>> from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    tensor([-0.6931])
    >>> from_logits(torch.zeros(1, 3), torch.tensor([1]), SamplingSupport(torch.tensor([0, 1]), torch.tensor([0, 2])))
    tensor([-0.6931])
    """
    ids = _check(logits, token_ids, kept, temperature, inplace_backward, vocab)
    log_probs, _ = log_probs_and_entropies(logits, ids, temperature, None, False, inplace_backward, kept, vocab)
    return log_probs.reshape(token_ids.shape)


@described
def entropy_from_logits(
    logits: Tensor, kept: SamplingSupport | None = None, *, temperature: float = 1.0, vocab: VocabShard | None = None
) -> PerToken:
    """Entropy of softmax(logits / temperature): H = −Σ_j p_j log p_j, with 0 log 0 = 0.

    With ``kept`` it is that of the truncated policy: p = π_K, and the sum is over K. Computed in float32 for any dtype
    of the logits. A row with NaN, or without a finite logit, gives NaN and gradient 0.

    Returns:
        float32 (or float64 if given) in nats, (...), between 0 and log V.

    >>> entropy_from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([0.6931])
    """
    check_logits(logits, temperature)
    size = check_vocab(vocab, logits.shape[-1])
    if kept is not None:
        check_kept(kept, logits.shape[:-1], size)
    no_tokens = logits.new_empty((*logits.shape[:-1], 0), dtype=torch.int64)
    _, entropies = log_probs_and_entropies(logits, no_tokens, temperature, kept=kept, vocab=vocab)
    assert entropies is not None
    return entropies


@described
def from_logits_with_entropy(
    logits: Tensor,
    token_ids: Tensor,
    kept: SamplingSupport | None = None,
    *,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    vocab: VocabShard | None = None,
) -> LogProbs:
    """:func:`from_logits` and :func:`entropy_from_logits` from one softmax.

    Both are in one graph: two backward passes need ``retain_graph=True``. An output without a gradient costs nothing.

    Args:
        inplace_backward: if a kernel is used, the gradient overwrites the logits; see :func:`from_logits`.

    Returns:
        log_probs like token_ids, entropies (...): float32 (or float64 if given) in nats.

    >>> from_logits_with_entropy(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    LogProbs(log_probs=tensor([-0.6931]), entropies=tensor([0.6931]))
    """
    ids = _check(logits, token_ids, kept, temperature, inplace_backward, vocab)
    log_probs, entropies = log_probs_and_entropies(logits, ids, temperature, None, True, inplace_backward, kept, vocab)
    assert entropies is not None
    return LogProbs(log_probs.reshape(token_ids.shape), entropies)


def check_kept(
    kept: SamplingSupport, leading: torch.Size, size: int, token_ids: Tensor | None = None, mask: Tensor | None = None
) -> None:
    """Raise ``ValueError`` unless each token (...) has a set, and each token where the mask is True is in its set.

    On an accelerator and in transforms only the shapes are checked.
    """
    ids, offsets = kept
    tokens = math.prod(leading)
    is_integer = not (ids.is_floating_point() or offsets.is_floating_point())
    if ids.dim() != 1 or offsets.shape != (tokens + 1,) or not is_integer:
        raise ValueError(
            f"kept has ids of shape {tuple(ids.shape)} and {ids.dtype}, offsets of {tuple(offsets.shape)} and "
            f"{offsets.dtype}, expected integers (K,) and ({tokens + 1},): a set for each of the "
            f"{tokens} tokens {tuple(leading)}, empty if it is the whole vocabulary"
        )
    if not are_readable(*(x for x in (ids, offsets, token_ids, mask) if x is not None)):
        return
    if offsets[0] != 0 or offsets[-1] != ids.shape[0] or (offsets.diff() < 0).any():
        raise ValueError(
            f"kept.offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {ids.shape[0]}, the number "
            "of kept.ids, and never to decrease; use SamplingSupport.from_counts"
        )
    if ids.numel() and (ids.min() < -size or ids.max() >= size):
        raise ValueError(
            f"kept.ids are in [{int(ids.min())}, {int(ids.max())}], expected ids of the {size} logits: "
            f"[0, {size - 1}], or ~id of one that is left out"
        )
    if ((ids[1:] < 0) ^ (ids[:-1] < 0))[kept.token_of.diff() == 0].any():
        raise ValueError("kept: a set has ids and ids ~v that are left out, expected one kind in each set")
    if token_ids is None:
        return
    inside = kept.contains(token_ids.flatten())
    if mask is not None:
        inside = inside | ~mask.flatten()
    if not inside.all():
        token = int(inside.int().argmin())
        raise ValueError(
            f"token {token} of {tokens} is {int(token_ids.flatten()[token])}, expected one of the "
            f"{int(offsets.diff()[token])} ids in its kept set; {int((~inside).sum())} tokens are outside theirs. Use "
            "the sets that the sampler drew from: sets from another forward pass differ by rounding"
        )


def _check(
    logits: Tensor,
    token_ids: Tensor,
    kept: SamplingSupport | None,
    temperature: float,
    inplace_backward: bool,
    vocab: VocabShard | None,
) -> Tensor:
    """The tokens as (..., K). Raises ``ValueError`` on wrong arguments."""
    check_logits(logits, temperature)
    check_tensors(token_ids=token_ids)
    leading = logits.shape[:-1]
    if leading not in (token_ids.shape, token_ids.shape[:-1]) or token_ids.dtype is not torch.int64:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, "
            f"expected int64 {tuple(leading)}, one token for each row of logits, or {(*leading, 'K')}; logits at "
            "position t are of token t + 1: use from_logits(logits[:, :-1], input_ids[:, 1:])"
        )
    size = check_vocab(vocab, logits.shape[-1], token_ids)
    if are_readable(token_ids) and token_ids.numel():
        low, high = (int(bound) for bound in token_ids.aminmax())
        if low < 0 or high >= size:
            raise ValueError(
                f"token_ids run from {low} to {high}, expected ids of the {size} logits: use "
                "token_ids.clamp(min=0) for labels with -100, and exclude those tokens from response_mask"
            )
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward=True would overwrite logits, which is a leaf: expected a model's output")
    if kept is not None:
        check_kept(kept, leading, size, token_ids if token_ids.shape == leading else None)
    return token_ids if token_ids.dim() == logits.dim() else token_ids[..., None]
