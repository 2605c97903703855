"""Wrong input raises a ValueError that names the argument, and every hyperparameter changes the result."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from rlprims.testing._cases import VOCABULARY, make_batch
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1, 2, 3)


def _assert_refused(p: Primitive, argument: str, what: str, **data: Tensor) -> None:
    outcome, error = "was accepted", None
    try:
        p.call(make_batch(0).replace(**data), p.variants[-1])
    except Exception as caught:
        outcome, error = f"raised {type(caught).__name__}: {caught}", caught
    named = isinstance(error, ValueError) and re.search(rf"\b{argument}\b", str(error))
    assert named, f"{what} {outcome}; expected a ValueError that names {argument}"


def _wrong_shapes(x: Tensor, per_token: bool) -> Iterator[Tensor]:
    yield torch.cat([x, x[..., :1]], dim=-1)
    yield x[..., :1]
    yield x[None]
    if per_token:
        yield x[0]


def wrong_shapes_are_refused(p: Primitive) -> None:
    """A ValueError that names the argument: too long, of size 1 (which would broadcast), too many or too few axes."""
    batch = make_batch(0)
    for name in p.inputs:
        if len(p.inputs) == 1 or name == "response_mask":
            continue
        for wrong in _wrong_shapes(batch.data[name], VOCABULARY[name] == "token"):
            _assert_refused(p, name, f"{name} of shape {tuple(wrong.shape)}", **{name: wrong})


def wrong_masks_are_refused(p: Primitive) -> None:
    """A ValueError that names response_mask: a float or integer mask, or one axis without cu_seqlens."""
    mask = make_batch(0).mask
    _assert_refused(p, "response_mask", "a float response_mask", response_mask=mask.double())
    _assert_refused(p, "response_mask", "an integer response_mask", response_mask=mask.long())
    if not p.is_by_position and all(VOCABULARY[name] == "token" for name in p.required):
        packed = make_batch(0).pack()
        data = {name: x for name, x in packed.data.items() if name != "cu_seqlens"}
        _assert_refused(p, "response_mask", "packed tokens without cu_seqlens", **data)


def wrong_groups_are_refused(p: Primitive) -> None:
    """A ValueError that names group_ids: floats, or ids that are not dense."""
    _wrong_ids_are_refused(p, "group_ids")


def wrong_rollouts_are_refused(p: Primitive) -> None:
    """A ValueError that names trajectory_ids: floats, or ids that are not dense."""
    _wrong_ids_are_refused(p, "trajectory_ids")


def _wrong_ids_are_refused(p: Primitive, name: str) -> None:
    ids = make_batch(0).data[name]
    _assert_refused(p, name, f"float {name}", **{name: ids.double()})
    _assert_refused(p, name, f"{name} beyond the number of rows", **{name: ids + 1000})
    _assert_refused(p, name, f"negative {name}", **{name: ids - 1})


def unknown_choices_are_refused(p: Primitive) -> None:
    """For a parameter annotated with a ``Literal``, another string raises a ValueError that lists the choices."""
    for name, choices in choices_of(p.fn).items():
        refused, outcome = False, "was accepted"
        try:
            p.call(make_batch(0), p.variants[-1], **{name: "no such choice"})
        except Exception as error:
            refused = isinstance(error, ValueError) and all(repr(choice) in str(error) for choice in choices)
            outcome = f"raised {type(error).__name__}: {error}"
        listed = ", ".join(map(repr, choices))
        assert refused, f"{name}='no such choice' {outcome}; expected a ValueError that lists {listed}"


def choices_of(fn: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """The strings that each parameter with a ``Literal`` takes."""
    try:
        hints = get_type_hints(inspect.unwrap(fn))
    except NameError:  # a hint uses a type that is imported for the type checker only
        return {}
    found = {name: tuple(_strings(hint)) for name, hint in hints.items() if name != "return"}
    return {name: strings for name, strings in found.items() if strings}


def _strings(hint: Any) -> Iterator[str]:
    for part in get_args(hint):
        if get_origin(hint) is Literal:
            yield from [part] if isinstance(part, str) else []
        else:
            yield from _strings(part)


def hyperparameters_matter(p: Primitive) -> None:
    """Each alternative value changes the result on some batch."""
    for name, other in p.alternatives.items():
        assert name in p.parameters, f"{name} is not a parameter"
        assert _matters(p, name, other), f"{name}={other!r} changes nothing"


def _matters(p: Primitive, name: str, other: Any) -> bool:
    for seed in SEEDS:
        batch = make_batch(seed)
        for names in p.variants:
            usual, changed = p.run(batch, names), p.run(batch, names, **{name: other})
            if not torch.equal(usual.value, changed.value):
                return True
            if any(not torch.equal(g, changed.gradients[n]) for n, g in usual.gradients.items()):
                return True
    return False
