"""See :func:`discounted_returns`."""

from functools import partial

import torch

from rlprims.blocks import by_blocks, selected
from rlprims.masking import check_sequences, check_tokens
from rlprims.recurrence import skipping_recurrence
from rlprims.turns import last_of_turn
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask, TurnIds


def discounted_returns(
    rewards: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    turn_ids: TurnIds | None = None,
    *,
    gamma: float = 1.0,
) -> PerToken:
    """Discounted reward-to-go, R_t = r_t + γ R_{t+1}, over the valid tokens of each sequence.

    The return of REINFORCE (Williams 1992, eq. 4) used as an advantage without a baseline. Masked tokens (tool output)
    are skipped: they neither discount nor cut the return, so the result equals that of the sequence without them.

    Args:
        rewards: float (B, T) or (N,), per token.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), value of what would have followed the last token: for truncated responses, 0
            for those that ended. None: every response ended.
        turn_ids: int (B, T) or (N,), which turn of the response a valid token belongs to. The return is then
            discounted from turn to turn and not inside one, so that all tokens of an answer value what follows it
            alike, however long it is. With each turn's reward on its last token, every token of a turn has the turn's
            return: ROLL's step_reinforce. None: every token is a turn.
        gamma: discount per valid token, or per turn.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.tensor([[True, True, False, True]])
    >>> discounted_returns(torch.tensor([[0.0, 0.0, 9.0, 1.0]]), m, gamma=0.5)
    tensor([[0.2500, 0.5000, 0.0000, 1.0000]])
    >>> discounted_returns(torch.tensor([[0.0, 0.0, 9.0, 1.0]]), m, turn_ids=torch.tensor([[0, 0, 0, 1]]), gamma=0.5)
    tensor([[0.5000, 0.5000, 0.0000, 1.0000]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    if bootstrap_values is not None:
        check_sequences(response_mask, cu_seqlens, bootstrap_values=bootstrap_values)
    discounts = None if turn_ids is None else last_of_turn(turn_ids, response_mask, cu_seqlens)
    block = partial(_in_block, gamma=gamma)
    return by_blocks(block, (rewards, response_mask, discounts), cu_seqlens, bootstrap_values)


def _in_block(
    rewards: PerToken,
    mask: TokenMask,
    discounts: TokenMask | None,
    cu_seqlens: CuSeqlens | None,
    bootstrap_values: PerSequence | None,
    *,
    gamma: float,
) -> PerToken:
    r = selected(rewards, mask)
    discount = gamma if discounts is None else torch.where(discounts, gamma, torch.ones_like(r))
    returns, _ = skipping_recurrence(discount, r, mask, bootstrap_values, cu_seqlens)
    return selected(returns, mask)
