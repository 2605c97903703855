"""Logits that are there to the sampled tokens' log-probs, and their entropies; and the gradient of the log-probs.

On a CPU verl and TRL take log-sum-exps row by row in float32, and a log-softmax in bf16 of bf16 logits: that is their
error there. ``rlprims, compiled`` is the same call under ``torch.compile``, left out where there is no C++ compiler;
``rlprims, formulas`` is it without kernels; ``rlprims, in place`` lets the gradient overwrite the logits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from shutil import which
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import Case, Function, by_formulas, largest_error
from benchmarks._peers import peer
from rlprims.logprobs import from_logits, from_logits_with_entropy

SIZES = ((1024, 32_768), (512, 151_936))
QUICK_SIZES = ((256, 4096), (1024, 32_768))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ORACLE_ROWS = 64  # at a time in float64, which of all rows would be gigabytes

LogProbs = Callable[[Tensor, Tensor], Tensor]
Entropies = Callable[[Tensor], Tensor]


class Rows(NamedTuple):
    logits: Tensor
    token_ids: Tensor
    upstream: Tensor


def cases(quick: bool) -> Iterator[Case]:
    for size in QUICK_SIZES if quick else SIZES:
        for dtype in NAMES:
            rows = _rows(*size, dtype)
            yield from (_scoring(rows, False), _scoring(rows, True), _training(rows))


def _rows(count: int, vocabulary: int, dtype: torch.dtype) -> Rows:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(count, vocabulary, generator=generator).to(dtype)
    token_ids = torch.randint(vocabulary, (count,), generator=generator)
    return Rows(logits, token_ids, torch.randn(count, generator=generator))


def _name(rows: Rows, what: str) -> str:
    return f"{'x'.join(map(str, rows.logits.shape))} {NAMES[rows.logits.dtype]} {what}"


def _scoring(rows: Rows, with_entropy: bool) -> Case:
    logits, token_ids, _ = rows
    parts = [_exact(logits[at], token_ids[at]) for at in _parts(rows)]
    want = [torch.cat(x) for x in zip(*parts, strict=True)][: 1 + with_entropy]

    def by(log_probs: LogProbs, entropies: Entropies) -> Function:
        if not with_entropy:
            return lambda: log_probs(logits, token_ids)
        return lambda: (log_probs(logits, token_ids), entropies(logits))

    ours = partial(from_logits_with_entropy if with_entropy else from_logits, logits, token_ids)
    peers = {who: by(*of) for who, of in _peers().items()} | _compiled(ours)
    peers["rlprims, formulas"] = by_formulas(ours)
    return Case(
        family="logits",
        name=_name(rows, "log-prob, entropy" if with_entropy else "log-prob"),
        ours=ours,
        peers=peers,
        error=lambda got: largest_error(got if with_entropy else (got,), want),
    )


def _training(rows: Rows) -> Case:
    in_place = partial(from_logits, inplace_backward=True)
    peers: dict[str, Function] = {who: partial(_two_ways, rows, of) for who, (of, _) in _peers().items()}
    own = rows._replace(logits=rows.logits.clone())  # later runs find a gradient there, and as many numbers
    return Case(
        family="logits",
        name=_name(rows, "train"),
        ours=partial(_two_ways, rows, from_logits),
        peers=peers
        | {
            "rlprims, formulas": by_formulas(partial(_two_ways, rows, from_logits)),
            "rlprims, in place": partial(_two_ways, own, in_place),
        },
        error=partial(_error, rows),
    )


def _two_ways(rows: Rows, of: LogProbs) -> tuple[Tensor, Tensor]:
    logits = rows.logits.detach().requires_grad_()
    output = logits.view_as(logits)  # as a model's: no leaf
    log_probs = of(output, rows.token_ids)
    return log_probs, torch.autograd.grad(log_probs, output, rows.upstream.to(log_probs.dtype))[0]


def _error(rows: Rows, got: tuple[Tensor, Tensor]) -> float:
    """The worse of both; gradients are compared a few rows at a time."""
    worst = 0.0
    for at in _parts(rows):
        logits = rows.logits[at].double().requires_grad_()
        log_probs, _ = _exact(logits, rows.token_ids[at])
        gradient = torch.autograd.grad(log_probs, logits, rows.upstream[at].double())
        worst = max(worst, largest_error((got[0][at], got[1][at]), (log_probs.detach(), *gradient)))
    return worst


def _parts(rows: Rows) -> list[slice]:
    return [slice(start, start + ORACLE_ROWS) for start in range(0, len(rows.logits), ORACLE_ROWS)]


def _exact(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.double()
    return _plain(logits, token_ids), _plain_entropies(logits)


def _plain(logits: Tensor, token_ids: Tensor) -> Tensor:
    return _log_softmax(logits).gather(1, token_ids[:, None])[:, 0]


def _plain_entropies(logits: Tensor) -> Tensor:
    log_p = _log_softmax(logits)
    return -(log_p.exp() * log_p).sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return (logits if logits.dtype is torch.float64 else logits.float()).log_softmax(-1)


def _compiled(function: Function) -> dict[str, Function]:
    if which("c++") is None and which("g++") is None:
        return {}
    compiled = torch.compile(function)
    compiled()  # so that nobody measures the compiler
    return {"rlprims, compiled": compiled}


def _peers() -> dict[str, tuple[LogProbs, Entropies]]:
    found: dict[str, tuple[LogProbs, Entropies]] = {"torch": (_plain, _plain_entropies)}
    if (of_verl := peer("verl.utils.torch_functional")) is not None:
        found["verl"] = (of_verl.logprobs_from_logits, of_verl.entropy_from_logits)
    if (of_trl := peer("trl.trainer.utils")) is not None:
        found["trl"] = (of_trl.selective_log_softmax, of_trl.entropy_from_logits)
    return found
