"""Routing replay for a mixture of experts: training uses the experts that the sampler used.

The router logits of the engine and of the trainer differ by rounding, so some tokens get other experts in training than
in sampling, which changes their ratio. Rollout routing replay (R3, Ma et al. 2025, arXiv:2510.11370) records the
experts of each token during sampling and trains with them. The gates are the trainer's, with a gradient.

``routed_experts`` are int (N, K) of one layer, or (N, L, K) of all layers: K experts for each of N tokens, including
prompt tokens. An entry of −1 means that no route is known: the engine never reads the last sampled token of a sequence,
nor padding. Carry them through ``turns`` as an extra, with ``fill=-1``.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlprims.kernels import are_readable
from rlprims.masking import upcast

UNKNOWN = -1
"""The entry of ``routed_experts`` for a token whose route was not recorded."""


def align(routed_experts: Tensor, tokens: int) -> Tensor:
    """An engine's record of one sequence with exactly one row for each token.

    An engine routes the tokens that it reads. When it draws the last of n = ``tokens``, it has read the first n − 1.
    Some engines give n − 1 rows, others n. A missing last row is filled with :data:`UNKNOWN`.

    Raises:
        ValueError: another number of rows.

    >>> align(torch.tensor([[0, 2], [1, 3]]), tokens=3)
    tensor([[ 0,  2],
            [ 1,  3],
            [-1, -1]])
    """
    rows = routed_experts.shape[0]
    if rows not in (tokens - 1, tokens):
        raise ValueError(f"routed_experts has {rows} rows, expected {tokens - 1} or {tokens} for {tokens} tokens")
    return pad(routed_experts, (0, 0) * (routed_experts.dim() - 1) + (0, tokens - rows), value=UNKNOWN)


def replay(router_logits: Tensor, routed_experts: Tensor, *, renormalize: bool = True) -> Tensor:
    """The gates of the recorded experts: g_i = M_i e^{s_i} / Σ_j M_j e^{s_j}, arXiv:2510.11370.

    s are the trainer's router logits, M_i is 1 for the experts that the sampler used. Give the logits before any top-k:
    after a top-k, an expert outside the trainer's own top-k has probability 0 and no gradient. A token without a known
    route uses the K experts with the largest logits, as without replay.

    Args:
        router_logits: float (N, E), one layer's, with gradient.
        routed_experts: int (N, K): different experts in [0, E), or all −1.
        renormalize: divide by the sum over the recorded experts, as the paper and models with ``norm_topk_prob`` do;
            False: divide by the sum over all E experts.

    Returns:
        float32 (or float64 if given) (N, E): 0 for the other experts.

    Raises:
        ValueError: wrong shapes or dtypes; on a CPU also an expert that does not exist, an expert that is listed twice,
            or a row with only some entries of −1.

    >>> logits = torch.tensor([[0.0, 0.0, 9.0], [0.0, 1.0, 1.0]])
    >>> replay(logits, torch.tensor([[0, 1], [-1, -1]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000]])
    """
    check_routes(router_logits, routed_experts)
    logits = upcast(router_logits)
    own = logits.detach().topk(routed_experts.shape[-1], dim=-1).indices
    experts = torch.where(routed_experts == UNKNOWN, own, routed_experts.long())
    is_recorded = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    if renormalize:
        return torch.where(is_recorded, logits, -torch.inf).softmax(-1)
    return torch.where(is_recorded, logits.softmax(-1), 0.0)


def check_routes(router_logits: Tensor, routed_experts: Tensor) -> None:
    """Raise ``ValueError`` unless the routes fit the logits. Values are checked on a CPU only, outside transforms."""
    shape = tuple(router_logits.shape)
    if router_logits.dim() != 2 or not router_logits.is_floating_point():
        raise ValueError(f"router_logits has shape {shape} and dtype {router_logits.dtype}, expected floats (N, E)")
    tokens, experts = router_logits.shape
    if routed_experts.dim() != 2 or len(routed_experts) != tokens or routed_experts.shape[1] > experts:
        raise ValueError(
            f"routed_experts has shape {tuple(routed_experts.shape)}, router_logits has {shape}: "
            "expected (N, K), K of E experts for each token of one layer"
        )
    if routed_experts.is_floating_point() or routed_experts.dtype is torch.bool:
        raise ValueError(f"routed_experts has dtype {routed_experts.dtype}, expected integers")
    if not are_readable(router_logits, routed_experts):
        return
    unknown = (routed_experts == UNKNOWN).sum(-1)
    outside = ((routed_experts < UNKNOWN) | (routed_experts >= experts)).any(-1)
    twice = (routed_experts.sort(-1).values.diff() == 0).any(-1) & (unknown == 0)
    partly = (unknown > 0) & (unknown < routed_experts.shape[1])
    for wrong, expected in (
        (outside, f"experts in [0, {experts})"),
        (twice, "different experts: fill padding with -1 and not with 0"),
        (partly, "either no -1 or only -1 in a row"),
    ):
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            given = [int(x) for x in routed_experts[row]]
            raise ValueError(f"routed_experts of token {row} is {given}, expected {expected}")
