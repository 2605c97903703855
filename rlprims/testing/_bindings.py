"""The laws for each kind of primitive, and the effort at which each law is tested."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias

from rlprims._json import beside
from rlprims.testing import _laws_kinds, _laws_numeric, _laws_sharding
from rlprims.testing._primitive import Primitive

Kind = Literal["advantage", "loss", "aggregation", "reward", "weights", "selector", "filter", "logits", "transforms"]
Effort = Literal["quick", "compiler", "usual", "thorough"]

Law: TypeAlias = Callable[[Primitive], None]


class Laws(NamedTuple):
    """The laws that each effort adds."""

    quick: tuple[Law, ...] = ()
    usual: tuple[Law, ...] = ()
    thorough: tuple[Law, ...] = ()

    def up_to(self, effort: Effort) -> dict[str, Law]:
        """The laws of an effort by name."""
        efforts = {"quick": self[:1], "compiler": self[1:2], "usual": self[:2], "thorough": self[:3]}
        return {law.__name__.replace("_", " "): law for laws in efforts[effort] for law in laws}


def _laws(table: Mapping[str, Sequence[str]]) -> tuple[Law, ...]:
    """The laws of a table: its keys are the ends of the names of modules."""
    modules = {name: import_module(f"rlprims.testing._laws_{name}") for name in table}
    return tuple(getattr(modules[module], law) for module, names in table.items() for law in names)


def _by_effort(table: Mapping[str, Any]) -> Laws:
    return Laws(**{effort: _laws(laws) for effort, laws in table.items()})


_TABLE = beside(__file__, "_laws.json")
_ALWAYS, _PER_ROW = _laws(_TABLE["every primitive"]), _laws(_TABLE["per row"])
_GROUP_BASELINE, _TWO_POLICIES = _laws(_TABLE["group baseline"]), _laws(_TABLE["two policies"])
_OF_DATA = {name: _laws(table) for name, table in _TABLE["its data"].items()}
_OF_KIND = {kind: _laws(table) for kind, table in _TABLE["its kind"].items()}
_OF_SHARDS: dict[str, Law] = {
    "vocab": _laws_sharding.a_vocabulary_may_be_cut,
    **dict.fromkeys(("all_reduce_rows", "shard"), _laws_sharding.sequences_may_be_cut),
    "all_reduce": _laws_sharding.a_batch_may_be_spread,
}

TRANSFORMS = _by_effort(_TABLE["transforms"])
"""The laws of every function."""

DERIVATIVES = _by_effort(_TABLE["derivatives"])
"""The laws of functions that are differentiated."""

PACKED = _by_effort(_TABLE["packed"])
"""The laws of functions of tokens."""


def laws_of(kind: Kind, p: Primitive) -> Laws:
    """The laws that apply to a function of this kind with these parameters."""
    of_shards = dict.fromkeys(law for name, law in _OF_SHARDS.items() if name in p.parameters)
    layers = [TRANSFORMS, Laws(tuple(of_shards))]
    if p.is_differentiable:
        layers.append(DERIVATIVES)
    if "packed" in p.layouts:
        layers.append(PACKED)
    if kind != "transforms":
        layers.append(Laws(_OF_KIND[kind] if kind == "logits" else _of_primitive(kind, p)))
    return Laws(*(sum(laws, start=()) for laws in zip(*layers, strict=True)))


def _of_primitive(kind: Kind, p: Primitive) -> tuple[Law, ...]:
    data = set(p.data)
    laws = sum((laws for name, laws in _OF_DATA.items() if name in data), start=_ALWAYS)
    if kind not in ("aggregation", "selector"):
        laws += _PER_ROW
    if kind == "advantage" and {"group_ids", "rewards"} <= data:
        laws += _GROUP_BASELINE
        if set(p.required) <= {"group_ids", "rewards", "response_mask"}:
            laws += (_laws_kinds.a_higher_score_never_gets_a_lower_advantage,)
    if kind == "loss":
        laws += (_laws_numeric.gradient_is_the_derivative,)
        if {"log_probs", "old_log_probs", "advantages"} <= data:
            laws += (_laws_kinds.on_policy_it_is_reinforce,)
        if "log_probs" in data and any(name.endswith("_log_probs") for name in data):
            laws += _TWO_POLICIES
        if getattr(p.fn, "token_wise", False):
            laws += (_laws_kinds.tokens_are_independent,)
    return laws + _OF_KIND.get(kind, ())
