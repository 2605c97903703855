"""Log-probs of tokens, and entropies, from hidden states and the LM head."""

from typing import Annotated

import torch
from torch import Tensor

from rlprims._described import described
from rlprims._sharding import check_vocab, shared
from rlprims.kernels import accelerated, without_autocast
from rlprims.logprobs._from_logits import LogProbs, check_kept, log_probs_and_entropies
from rlprims.masking import check_above, check_placements, check_temperature, check_tensors, upcast
from rlprims.types import SamplingSupport, VocabShard


@accelerated(cpu="linear_log_probs", cuda="linear_log_probs", differentiable=True)
def linear_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None,
    kept: SamplingSupport | None = None,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the logits z = hidden @ head_weightᵀ, or of c · tanh(z / c)."""
    finite = hidden.isfinite().all(-1)
    states = torch.where(finite[..., None], shared(vocab, hidden), 0.0)
    with without_autocast(hidden):
        logits = upcast(states) @ upcast(head_weight).T
        log_probs, entropies = log_probs_and_entropies.formula(
            logits, token_ids[..., None], temperature, soft_cap, kept=kept, vocab=vocab
        )
    assert entropies is not None
    return torch.where(finite, log_probs[..., 0], torch.nan), torch.where(finite, entropies, torch.nan)


@described
def from_hidden(
    hidden: Annotated[Tensor, "float (..., H)"],
    head_weight: Annotated[Tensor, "float (V, H)"],
    token_ids: Tensor,
    kept: SamplingSupport | None = None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    vocab: VocabShard | None = None,
) -> LogProbs:
    """Log-prob and entropy of softmax(z / temperature) from hidden states and the LM head, z = hidden @ head_weightᵀ.

    In eager code a kernel computes one tile of tokens at a time: the logits (N, V) are never in memory together, and
    only the arguments are saved for backward. z is computed in float32 for any dtype of the arguments; peers round it
    to bf16. A gradient has the dtype of its argument, and that of head_weight is summed in float32. No gradient is
    computed for a head that needs none (frozen, or with adapters only before it), or for an output without a gradient.
    Compiled code and second derivatives have all logits in memory.

    For a head with a bias, append a column to both: 1 to each hidden state, and the bias to head_weight. If the
    log-probs are used in a token-wise loss only, :func:`fused_loss` saves the second product with the head. A hidden
    state with NaN or Inf gives NaN; it adds nothing to its own gradient or to that of the head.

    Args:
        token_ids: int64 (...), in [0, V).
        vocab: if head_weight is this rank's rows of the head; see :class:`rlprims.types.VocabShard`. The gradient of
            hidden is summed over the ranks in backward. No kernel is used: the logits of the shard are in memory.

    Returns:
        log_probs, entropies: float32 (or float64 if given) in nats, (...).

    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 1.0]])
    >>> from_hidden(hidden, head, torch.tensor([1]))
    LogProbs(log_probs=tensor([-0.6931]), entropies=tensor([0.6931]))
    """
    check_head(hidden, head_weight, token_ids, temperature, soft_cap)
    size = check_vocab(vocab, head_weight.shape[0], token_ids)
    if kept is not None:
        check_kept(kept, token_ids.shape, size, token_ids)
    return LogProbs(*linear_log_probs(hidden, head_weight, token_ids, temperature, soft_cap, kept, vocab))


def check_head(
    hidden: Tensor, head: Tensor, token_ids: Tensor | None, temperature: float, soft_cap: float | None, of: str = ""
) -> None:
    """Raise ``ValueError`` unless a head (V, H) fits hidden states (..., H) and tokens; ``of`` begins their names."""
    check_temperature(temperature)
    check_tensors(**{f"{of}hidden": hidden, f"{of}head_weight": head})
    check_placements(hidden.dim() - 2, **{f"{of}hidden": hidden})
    check_placements(-1, **{f"{of}head_weight": head})
    if hidden.dim() < 1 or not hidden.is_floating_point():
        got = f"shape {tuple(hidden.shape)} and dtype {hidden.dtype}"
        raise ValueError(f"{of}hidden has {got}, expected floats (..., H)")
    if head.dim() != 2 or head.shape[1] != hidden.shape[-1] or head.dtype is not hidden.dtype:
        raise ValueError(
            f"{of}head_weight has shape {tuple(head.shape)} and dtype {head.dtype}, expected "
            f"{hidden.dtype} (V, {hidden.shape[-1]}) like {of}hidden: the weight of the head's nn.Linear"
        )
    check_above(0, ", or None for logits without a cap", soft_cap=soft_cap)
    if token_ids is None:
        return
    check_tensors(token_ids=token_ids)
    if token_ids.shape != hidden.shape[:-1] or token_ids.dtype is not torch.int64:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, "
            f"expected int64 {tuple(hidden.shape[:-1])}: one token for each hidden state"
        )
