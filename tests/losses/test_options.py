"""What the losses say of themselves and refuse alike: options, and which of them are token-wise."""

import inspect
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from rlprims import losses
from tests.losses.loss_batches import PER_TOKEN, WIDTH, arguments_of, batch, pack

SEQUENCE_LOSSES = {
    *("gspo", "gspo_token", "gmpo", "opmd", "topr"),
    *("vespo", "gvpo", "rewards_as_labels", "flowrl", "online_dpo"),
}


def choices(hint: Any) -> tuple[str, ...]:
    """Of a ``Literal``, or of a ``Literal`` or None."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(choice for part in get_args(hint) for choice in choices(part))
    return get_args(hint) if get_origin(hint) is Literal else ()


def options() -> Iterator[tuple[str, str]]:
    for name in PER_TOKEN:
        for option, hint in get_type_hints(getattr(losses, name)).items():
            if choices(hint):
                yield name, option


def test_the_options_are_found() -> None:
    assert {("gspo", "mean"), ("kl", "value"), ("kl", "gradient"), ("topr", "level"), ("dppo", "divergence")} <= {
        *options()
    }


@pytest.mark.parametrize(("name", "option"), list(options()))
def test_an_unknown_option_is_refused_with_the_list_of_choices(name: str, option: str) -> None:
    loss = getattr(losses, name)
    _, arguments = arguments_of(loss, batch())
    with pytest.raises(ValueError, match=f"{option}='nonsense', expected ") as caught:
        loss(**arguments, **{option: "nonsense"})
    for choice in choices(get_type_hints(loss)[option]):
        assert repr(choice) in str(caught.value)


def per_token(name: str, data: dict[str, Tensor]) -> Tensor:
    return PER_TOKEN[name](**arguments_of(PER_TOKEN[name], data)[1])


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_loss_is_marked_token_wise_if_and_only_if_each_token_stands_for_itself(name: str) -> None:
    """Packed as sequences of one token each, in reverse order, a token-wise loss gives the same numbers.

    To rounding: a processor computes the last elements of a tensor by other instructions than those before.
    """
    data = pack(batch())
    of_tokens = data | {"group_ids": data["group_ids"].repeat_interleave(WIDTH)}
    tokens = data["response_mask"].numel()
    reverse = torch.arange(tokens).flip(0)
    apart = {key: x[reverse] for key, x in of_tokens.items() if key != "cu_seqlens"}
    apart["cu_seqlens"] = torch.arange(tokens + 1)
    equal = torch.allclose(per_token(name, apart), per_token(name, data)[reverse], rtol=1e-6, atol=1e-7)
    assert equal is getattr(PER_TOKEN[name], "token_wise", False)
    assert equal is (name not in SEQUENCE_LOSSES)


def test_a_marked_loss_is_the_same_function() -> None:
    assert inspect.isfunction(losses.clipped_surrogate)
    assert losses.clipped_surrogate.__module__ == "rlprims.losses._clipped"


def numbers_of_losses() -> Iterator[tuple[str, str]]:
    for name in PER_TOKEN:
        for option, hint in get_type_hints(getattr(losses, name)).items():
            if hint is float or float in get_args(hint):
                yield name, option


@pytest.mark.parametrize(("name", "option"), list(numbers_of_losses()))
def test_a_hyperparameter_that_is_no_number_is_refused(name: str, option: str) -> None:
    loss = getattr(losses, name)
    _, arguments = arguments_of(loss, batch())
    with pytest.raises(ValueError, match="nan"):
        loss(**{**arguments, option: float("nan")})
