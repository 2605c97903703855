"""The laws for each kind of primitive, and the effort at which each law is tested."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from rlprims.testing import (
    _laws_compile,
    _laws_errors,
    _laws_kinds,
    _laws_layout,
    _laws_logits,
    _laws_numeric,
    _laws_sharding,
    _laws_tensors,
    _laws_transforms,
)
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


_ALWAYS: tuple[Law, ...] = (
    _laws_layout.rows_may_be_permuted,
    _laws_layout.empty_batches_are_legal,
    _laws_numeric.inputs_are_untouched,
    _laws_numeric.strides_do_not_matter,
    _laws_numeric.no_global_randomness,
    _laws_numeric.no_value_is_read_by_the_host,
    _laws_numeric.float32_whatever_comes_in,
    _laws_numeric.float64_stays,
    _laws_errors.wrong_shapes_are_refused,
    _laws_errors.hyperparameters_matter,
    _laws_errors.unknown_choices_are_refused,
)
_OF_DATA: dict[str, tuple[Law, ...]] = {
    "response_mask": (
        _laws_layout.padding_changes_nothing,
        _laws_layout.packed_equals_padded,
        _laws_layout.masked_is_absent,
        _laws_layout.zero_outside_the_mask,
        _laws_layout.nothing_valid_gives_zero,
        _laws_errors.wrong_masks_are_refused,
        _laws_tensors.any_nonzero_byte_is_true,
    ),
    "group_ids": (_laws_layout.groups_may_be_renamed, _laws_errors.wrong_groups_are_refused),
    "trajectory_ids": (_laws_layout.rollouts_may_be_renamed, _laws_errors.wrong_rollouts_are_refused),
}
_OF_SHARDS: dict[str, Law] = {
    "vocab": _laws_sharding.a_vocabulary_may_be_cut,
    **dict.fromkeys(("all_reduce_rows", "shard"), _laws_sharding.sequences_may_be_cut),
    "all_reduce": _laws_sharding.a_batch_may_be_spread,
}
_PER_ROW: tuple[Law, ...] = (
    _laws_layout.batches_may_be_merged,
    _laws_layout.nan_stays_in_its_group,
    _laws_numeric.constants_get_no_gradient,
)
_GROUP_BASELINE: tuple[Law, ...] = (
    _laws_kinds.equal_rewards_give_zero,
    _laws_kinds.a_shift_of_a_group_cancels,
    _laws_kinds.a_scale_passes_or_cancels,
    _laws_kinds.one_advantage_per_response,
)
_TWO_POLICIES: tuple[Law, ...] = (_laws_kinds.far_log_ratios_are_finite, _laws_kinds.impossible_tokens_are_finite)
_OF_KIND: dict[Kind, tuple[Law, ...]] = {
    "aggregation": (
        _laws_numeric.gradient_is_the_derivative,
        _laws_kinds.parts_sum_to_the_whole,
        _laws_kinds.rows_without_tokens_do_not_count,
        _laws_kinds.it_is_linear,
    ),
    "selector": (_laws_kinds.every_token_gets_an_answer,),
    "filter": (
        _laws_kinds.groups_are_kept_whole,
        _laws_kinds.equal_scores_are_dropped,
        _laws_kinds.unknown_scores_are_dropped,
        _laws_kinds.twice_is_once,
    ),
}
_LOGITS: tuple[Law, ...] = (
    _laws_logits.any_leading_shape,
    _laws_logits.a_shift_of_logits_cancels,
    _laws_logits.banned_tokens_are_legal,
    _laws_logits.unread_rows_get_no_gradient,
    _laws_logits.float32_whatever_comes_in,
    _laws_numeric.float64_stays,
    _laws_numeric.inputs_are_untouched,
    _laws_numeric.no_global_randomness,
    _laws_numeric.gradient_is_the_derivative,
    _laws_errors.hyperparameters_matter,
)

TRANSFORMS = Laws(
    quick=(
        _laws_transforms.vmap_is_a_loop,
        _laws_tensors.subclasses_pass_through,
        _laws_tensors.settings_of_torch_change_nothing,
    ),
    usual=(_laws_compile.fake_tensors_are_enough, _laws_compile.one_graph_for_all_batch_sizes),
    thorough=(
        _laws_compile.exports_with_a_dynamic_batch,
        _laws_tensors.replicated_tensors_work,
        _laws_tensors.row_sharded_tensors_work,
    ),
)
"""The laws of every function."""

DERIVATIVES = Laws(
    quick=(
        _laws_transforms.func_grad_is_autograd,
        _laws_transforms.jvp_is_the_transpose_of_grad,
        _laws_transforms.vmap_of_grad_is_a_loop,
        _laws_transforms.gradients_have_gradients,
        _laws_transforms.second_derivative_is_right,
    ),
    thorough=(_laws_transforms.every_second_derivative_is_right,),
)
"""The laws of functions that are differentiated."""

PACKED = Laws(
    usual=(_laws_compile.packed_tokens_compile,),
    thorough=(_laws_compile.one_graph_for_all_packed_batches, _laws_compile.exports_packed_with_a_dynamic_batch),
)
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
        layers.append(Laws(_LOGITS if kind == "logits" else _of_primitive(kind, p)))
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
