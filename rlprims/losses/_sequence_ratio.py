"""The importance ratio of a whole response, which the sequence-level losses share."""

from rlprims.masking import LOG_RATIO_LIMIT, sequence_lengths, sequence_sum, to_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def summed_log_ratio(
    log_probs: PerToken, old_log_probs: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None
) -> PerToken:
    """Σ_t (log_probs − old_log_probs) over each sequence, on each of its valid tokens; not clamped."""
    difference = zero_outside(log_probs, mask) - zero_outside(old_log_probs, mask).detach()
    return to_tokens(sequence_sum(difference, mask, cu_seqlens), mask, cu_seqlens)


def lengths_of_tokens(mask: TokenMask, cu_seqlens: CuSeqlens | None) -> PerToken:
    """The number of valid tokens of each token's sequence; at least 1, so that it may divide."""
    lengths = sequence_lengths(mask, cu_seqlens).clamp(min=1)
    return to_tokens(lengths, mask, cu_seqlens).clamp(min=1)


def sequence_log_ratio(
    log_probs: PerToken, old_log_probs: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None, *, mean: bool
) -> PerToken:
    """Sum or mean of the log-ratios of each sequence, clamped to ±20, on each of its valid tokens.

    The clamp is on the sequence's number and not on the tokens', so that the ratio is that of the response.
    """
    total = summed_log_ratio(log_probs, old_log_probs, mask, cu_seqlens)
    if mean:
        total = total / lengths_of_tokens(mask, cu_seqlens)
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
