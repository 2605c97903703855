"""See :func:`potential_shaping`."""

import torch

from rlprims.masking import check_tokens, zero_outside
from rlprims.recurrence import reverse_recurrence
from rlprims.types import CuSeqlens, PerToken, TokenMask


def potential_shaping(
    potentials: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, gamma: float = 1.0
) -> PerToken:
    """Potential-based shaping, Ng, Harada and Russell 1999, to be added to the rewards: F_t = γ Φ_{t+1} − Φ_t.

    Φ_t is what the state before token t is worth: a progress estimate, a process reward model. After the last token it
    is 0, so the discounted sum of F over a response is −Φ_0, the same for every response to a prompt: the best policy
    is the one it was, and only the credit of the tokens changes. A potential that is added as a plain reward has no
    such promise.

    Masked tokens are skipped: t+1 is the next token that the policy sampled.

    Args:
        potentials: float (B, T) or (N,), Φ before each token.
        response_mask: bool, like potentials.
        cu_seqlens: int (B+1,) if packed.
        gamma: the discount of the returns that it is added to.

    Returns:
        float, like potentials; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; gamma outside [0, 1].

    >>> import torch
    >>> m = torch.tensor([[True, False, True, True]])
    >>> potential_shaping(torch.tensor([[0.5, 9.0, 0.7, 0.9]]), m)
    tensor([[ 0.2000,  0.0000,  0.2000, -0.9000]])
    """
    check_tokens(response_mask, cu_seqlens, potentials=potentials)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma} must be in [0, 1]")
    phi = zero_outside(potentials, response_mask)
    rows = len(response_mask) if cu_seqlens is None else len(cu_seqlens) - 1
    _, following = reverse_recurrence((~response_mask).to(phi.dtype), phi, phi.new_zeros(rows), cu_seqlens)
    return torch.where(response_mask, gamma * following - phi, 0.0)
