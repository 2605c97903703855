"""The laws of numbers for a function of any trainer, and for each broken law a small program that shows it."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprims._near import near
from rlprims.layout import pack, unpack
from rlprims.testing import _laws_kinds, _laws_layout, _laws_numeric
from rlprims.testing._bindings import Kind, laws_of
from rlprims.testing._call import gradients_of, reason
from rlprims.testing._cases import TOY, VOCABULARY, make_batch
from rlprims.testing._checks import broken_laws, subject_of
from rlprims.testing._primitive import DIFFERENTIABLE

_OF_NUMBERS = {laws.__name__ for laws in (_laws_kinds, _laws_layout, _laws_numeric)}
_OF_PRIMITIVES = {"packed equals padded", "constants get no gradient", "no value is read by the host"}
_OF_TOKENS = {"batches may be merged", "nan stays in its group", "on policy it is reinforce"}
_PROGRAM = Path(__file__).with_name("_program.txt").read_text("utf-8")
Data = dict[str, Tensor]


def verdicts(fn: Callable[..., Any], path: str, kind: Kind, arguments: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The laws for the function at ``path``. Of a tuple its first result is tested, of a scalar no law of tokens.

    ``arguments``: of its parameters the names in the vocabulary, or JSON values. The result has for each law why it is
    broken, and a program of a small case that shows it; or two empty texts.

    Raises:
        ValueError: a parameter that it does not have, or without a name or a value; or the first call raises.
    """
    call = _under_our_names(fn, path, arguments)
    subject = subject_of(call, kind, {})
    try:
        is_scalar = subject.sample(*TOY)().dim() == 0
    except Exception as error:
        raise ValueError(f"{path} fails on 8 rows of 6 tokens: {reason(error)}") from None
    left_out = _OF_PRIMITIVES | (_OF_TOKENS if is_scalar else set())
    known = laws_of(kind, subject).up_to("quick")
    laws = {law: f for law, f in known.items() if f.__module__ in _OF_NUMBERS and law not in left_out}
    broken = broken_laws(subject, laws)
    return {law: (broken[law], _program(call, path, law)) if law in broken else ("", "") for law in laws}


def _under_our_names(fn: Callable[..., Any], path: str, arguments: Mapping[str, str]) -> Any:
    """``fn`` with the vocabulary's names and a tensor as its result. Packed tokens are padded before the call."""
    own = inspect.signature(fn).parameters
    if unknown := [name for name in arguments if name not in own]:
        raise ValueError(f"{path} has no parameter {unknown[0]!r}: expected one of {', '.join(own)}")
    texts = {name: name for name in own if name in VOCABULARY} | dict(arguments)
    ours = {text: name for name, text in texts.items() if text in VOCABULARY}
    values = {name: _value(name, text) for name, text in texts.items() if text not in VOCABULARY}
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in texts:
            raise ValueError(f"{path} needs {name}: write its name in the vocabulary or a value, {name}=0.2")

    @wraps(fn)
    def call(cu_seqlens: Tensor | None = None, **data: Tensor) -> Any:
        if cu_seqlens is not None:
            width = max(cu_seqlens.diff().tolist(), default=0)
            data |= {name: unpack(x, cu_seqlens, width) for name, x in data.items() if VOCABULARY[name] == "token"}
        result = fn(**{ours[name]: x for name, x in data.items()}, **values)
        result = result[0] if isinstance(result, tuple) else result
        return pack(result, cu_seqlens) if cu_seqlens is not None and result.dim() == 2 else result

    packed = inspect.Parameter("cu_seqlens", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    data = [packed.replace(name=name, default=packed.empty) for name in ours]
    vars(call).update(__signature__=inspect.Signature([*data, packed]), ours=ours, values=values)
    return call


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        meant = near(text, VOCABULARY)
        hint = f"did you mean {meant}?" if meant else "expected one of its names, or JSON"
        raise ValueError(f"{name}={text} is not in the vocabulary: {hint}") from None


def _changes(law: str, data: Data) -> Iterator[tuple[Data, str]]:
    """Changes of a small batch, and what the law expects of both results, or of the second."""
    tokens = {name: x for name, x in data.items() if VOCABULARY[name] == "token"}
    match law:
        case "masked is absent":
            for name in (name for name, x in tokens.items() if x.is_floating_point()):
                yield {name: torch.where(data["response_mask"], data[name], torch.nan)}, "the same"
        case "padding changes nothing":
            junk = {name: 7.0 * x.is_floating_point() for name, x in tokens.items()}
            yield {name: torch.nn.functional.pad(x, (0, 1), value=junk[name]) for name, x in tokens.items()}, "the same"
        case "nothing valid gives zero":
            yield {"response_mask": torch.zeros_like(data["response_mask"])}, "0"
        case "far log ratios are finite" | "impossible tokens are finite":
            for size in (100.0, 1000.0) if law.startswith("far") else (torch.inf,):
                for one, other in ((-1.0, -1 - size), (-1 - size, -1.0)):
                    pair = {name: torch.full_like(x, other) for name, x in tokens.items() if name.endswith("log_probs")}
                    yield {**pair, "log_probs": torch.full_like(data["log_probs"], one)}, "finite numbers"


def _keeps(call: Any, leaves: list[str], given: list[Data], expected: str) -> bool:
    """Whether values and gradients of two batches are as expected."""
    found: list[Data] = []
    for data in given:
        inputs = {name: data[name].clone().requires_grad_() for name in leaves}
        try:
            value = call(**{**data, **inputs})
        except Exception:  # of the first batch it says nothing about the law
            return not found
        found.append({"": value.detach(), **gradients_of(value, inputs)})
    if expected != "the same":
        holds = torch.isfinite if expected == "finite numbers" else torch.logical_not
        return all(bool(holds(x).all()) for x in found[1].values())
    pairs = [(x[..., : found[0][name].shape[-1]] if x.dim() else x, found[0][name]) for name, x in found[1].items()]
    return all(torch.allclose(x, y, atol=1e-5) for x, y in pairs)


def _program(call: Any, path: str, law: str) -> str:
    """A program that shows the broken law on three rows; empty if no small case does."""

    def text(data: Data) -> str:
        return ",\n    ".join(f'"{call.ours[x]}": torch.tensor({_rounded(data[x]).tolist()})' for x in data)

    module, _, name = path.rpartition("/")[2].replace(".py:", ".").replace(":", ".").rpartition(".")
    named = {"module": module, "name": name, "path": path, "law": law}
    named["values"] = "".join(f", {key}={value!r}" for key, value in call.values.items())
    leaves = [our for our in call.ours if our in DIFFERENTIABLE]
    named["inputs"] = ", ".join(f'given["{call.ours[x]}"].requires_grad_()' for x in leaves)
    for seed in range(20):
        batch = make_batch(seed, torch.float32, 3, 3)
        data = {our: _rounded(batch.data[our]).to(batch.data[our].dtype) for our in call.ours}
        for change, expected in _changes(law, data):
            if not _keeps(call, leaves, [data, {**data, **change}], expected):
                return _PROGRAM.format(data=text(data), changed=text(change), expected=expected, **named)
    return ""


def _rounded(x: Tensor) -> Tensor:
    return x.double().round(decimals=2) if x.is_floating_point() else x
