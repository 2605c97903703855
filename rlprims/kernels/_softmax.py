"""Rows of logits to log-probs, entropies and slopes: see ``rlprims.softmax``."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LEAST_LOG = -1000.0  # below it a probability is 0 even in float64: a finite −inf


def softmax(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    *,
    entropies: Tensor | None = None,
    slopes: Tensor | None = None,
    of_log_probs: Tensor | None = None,
    of_entropies: Tensor | None = None,
) -> Tensor:
    """Log-probs (N, K) of the rows' tokens; what is not None of ``entropies`` (N,) and ``slopes`` (N, V) is written.

    Slopes are the gradient of logits for that of log-probs and of entropies (None: 0). They may be the logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    count, width = logits.shape
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    scale = torch.full((), temperature, dtype=dtype, device=logits.device)  # a bare number would be a float32
    selected = rows.gather(1, token_ids).to(dtype) / scale  # before slopes are written in their place
    log_probs = torch.empty_like(selected)
    unused = log_probs
    with torch.cuda.device_of(logits):
        _softmax[(count,)](
            rows,
            token_ids.contiguous(),
            scale,
            selected,
            unused if of_log_probs is None else of_log_probs.to(dtype).contiguous(),
            unused if of_entropies is None else of_entropies.to(dtype).contiguous(),
            log_probs,
            unused if entropies is None else entropies,
            unused if slopes is None else slopes,
            width,
            token_ids.shape[1],
            rows.stride(0),
            0 if slopes is None else slopes.stride(0),
            ENTROPIES=entropies is not None,
            SLOPES=slopes is not None,
            OF_ENTROPIES=of_entropies is not None,
            LEAST_LOG=_LEAST_LOG,
            BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        )
    if slopes is not None:
        torch.autograd.graph.increment_version(slopes)  # so that torch refuses who had saved the logits
    return log_probs


def probe(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of two blocks with banned tokens, once a whole block; two tokens each; the last row is not read."""
    generator = torch.Generator().manual_seed(0)
    temperature = 0.7
    logits = (4 * torch.randn(3, _BLOCK + 5, generator=generator)).to(dtype)
    logits[0, ::3] = logits[1, :_BLOCK] = -torch.inf
    token_ids = torch.tensor([[1, _BLOCK], [_BLOCK + 1, _BLOCK + 1], [0, 2]])
    g, h = torch.tensor([[1.5, -0.5], [-2.0, 0.25], [0.0, 0.0]]), torch.tensor([-0.5, 2.0, 0.0])
    log_p = (logits.double() / temperature).log_softmax(-1)
    p, finite = log_p.exp(), log_p.clamp(min=_LEAST_LOG)
    entropies = -(p * finite).sum(-1)
    of_log_probs = torch.zeros_like(p).scatter_add_(1, token_ids, g.double()) - p * g.sum(1, keepdim=True)
    of_both = of_log_probs - h[:, None] * p * (finite + entropies[:, None])

    here, ids, g, h = (x.to(device) for x in (logits, token_ids, g, h))
    got = torch.empty(3, device=device, dtype=torch.promote_types(dtype, torch.float32))
    yield softmax(here, ids, temperature, entropies=got), log_p.gather(1, token_ids)
    yield got, entropies
    slopes, again = torch.empty_like(here), torch.empty_like(got)
    softmax(here, ids, temperature, entropies=again, slopes=slopes, of_log_probs=g)
    yield again, entropies
    yield slopes, of_log_probs / temperature
    softmax(here, ids, temperature, slopes=here, of_log_probs=g, of_entropies=h)
    yield here, of_both / temperature


@triton.jit
def _softmax(
    logits,
    token_ids,
    scale,
    selected,
    of_log_probs,
    of_entropies,
    log_probs,
    entropies,
    slopes,
    width,
    k,
    logits_stride,
    slopes_stride,
    ENTROPIES: tl.constexpr,
    SLOPES: tl.constexpr,
    OF_ENTROPIES: tl.constexpr,
    LEAST_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    temperature = tl.load(scale)
    dtype = temperature.dtype
    columns = tl.arange(0, BLOCK)

    # One sweep: the peak so far, Σ exp(z − peak), and Σ exp(z − peak) (z − peak), the last two by lane.
    peak = tl.full([], float("-inf"), dtype)
    total = tl.zeros([BLOCK], dtype)
    moment = tl.zeros([BLOCK], dtype)
    for start in range(0, width, BLOCK):
        z = tl.load(logits + start + columns, mask=start + columns < width, other=float("-inf")).to(dtype) / temperature
        higher = tl.maximum(peak, tl.max(z))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # −inf − −inf is NaN
        fall = tl.where(peak == float("-inf"), 0.0, peak - base)
        below = z - base
        e = tl.exp(below)
        if ENTROPIES or OF_ENTROPIES:
            moment = tl.exp(fall) * (moment + fall * total) + e * tl.maximum(below, LEAST_LOG)
        total = tl.exp(fall) * total + e
        peak = higher
    sum_of_exp = tl.sum(total)
    log_sum = tl.log(sum_of_exp)
    entropy = log_sum - tl.sum(moment) / sum_of_exp
    if ENTROPIES:
        tl.store(entropies + row, entropy)
    for i in range(k):
        tl.store(log_probs + row * k + i, tl.load(selected + row * k + i) - peak - log_sum)

    if SLOPES:
        # d log p_a / d z_j = 1[j = a] − p_j and d H / d z_j = −p_j (log p_j + H); a row that no loss reads gets 0
        all_of_them = tl.full([], 0.0, dtype)
        read = all_of_them != 0
        for i in range(k):
            g = tl.load(of_log_probs + row * k + i)
            all_of_them += g
            read = read | (g != 0)
        h = tl.full([], 0.0, dtype)
        if OF_ENTROPIES:
            h = tl.load(of_entropies + row)
            read = read | (h != 0)
        for start in range(0, width, BLOCK):
            at = start + columns
            z = tl.load(logits + at, mask=at < width, other=float("-inf")).to(dtype) / temperature
            log_p = z - peak - log_sum
            slope = -all_of_them
            if OF_ENTROPIES:
                slope = -all_of_them - h * (tl.maximum(log_p, LEAST_LOG) + entropy)
            slope = tl.exp(log_p) * slope
            for i in range(k):
                slope += tl.where(at == tl.load(token_ids + row * k + i), tl.load(of_log_probs + row * k + i), 0.0)
            slope = tl.where(read, slope / temperature, 0.0)
            tl.store(slopes + row * slopes_stride + at, slope.to(slopes.dtype.element_ty), mask=at < width)
