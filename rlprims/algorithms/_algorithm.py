"""The :class:`Algorithm`: the function and the hyperparameters of each stage."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlprims import controllers, filters, losses
from rlprims._near import near
from rlprims.algorithms._use import BoundFunction, import_path, use
from rlprims.ended import EndedName


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic would accept it as the number 1
            raise ValueError(f"expected a number, a text or a function, got {value}")
        return value


class GroupFilter(_Spec):
    """Dynamic sampling: the selection of the groups to train on."""

    metric: str = Field(
        default="acc",
        description="the column that keep gets as scores: scores, shaped_scores, or any that a verifier returned; "
        "if there is no acc, scores",
    )
    keep: BoundFunction = Field(
        default=use(filters.varied_scores), description="(scores, group_ids), or other columns, to keep or drop"
    )
    max_generation_batches: int | None = Field(
        default=10, ge=1, description="generation batches per training batch; null: no limit"
    )
    at_limit: Literal["error", "smaller_batch"] = "error"


class KLInReward(_Spec):
    """The KL to the reference as a penalty on the reward."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    controller: BoundFunction = Field(default=use(controllers.FixedKL), description="coefficient, fixed or adaptive")


_STATEFUL = {"kl_in_reward", "baseline", "coefficient"}

Policy: TypeAlias = Literal["score", "leave_out", "mask_turn", "drop_group"]


class Endings(_Spec):
    """The treatment of a response, by the reason of its end.

    ``score``: it counts like any other. ``leave_out``: it is False in ``valid_rows``, so it is in no statistic and has
    advantage 0. ``mask_turn``: its score counts, but the tokens of its last turn (without ``turn_ids``: all of its
    tokens) are in no loss and no mean. ``drop_group``: its group is dropped, as by a filter.

    >>> Endings(length="mask_turn").reasons("drop_group")
    ('timeout', 'error', 'aborted')
    """

    stop: Policy = "score"
    length: Policy = "score"
    turns: Policy = "score"
    context: Policy = "score"
    parse_error: Policy = "score"
    timeout: Policy = "drop_group"
    error: Policy = "drop_group"
    aborted: Policy = "drop_group"

    def reasons(self, policy: Policy) -> tuple[EndedName, ...]:
        """The reasons that have this policy."""
        return tuple(name for name in get_args(EndedName) if getattr(self, name) == policy)


class LossTerm(_Spec):
    """A term of the objective: coefficient · mean of a loss over the term's own tokens.

    By default its tokens, mean and denominator are those of the policy loss, to which it is added by token.
    """

    coefficient: float | BoundFunction = Field(
        description="a number, or a controller that computes it, such as controllers.AdaptiveEntropy"
    )
    loss: BoundFunction
    mask: str = Field(default="response_mask", description="bool column of its tokens, such as observation_mask")
    tokens: BoundFunction | None = Field(
        default=None, description="selects some of the mask's tokens, over a whole update; null: all"
    )
    aggregation: BoundFunction | None = Field(default=None, description="the mean of its losses; null: the algorithm's")
    over: Literal["policy", "term"] = Field(
        default="policy",
        description="the denominator of the mean: the step's count of response_mask, or of the term's own tokens",
    )

    @property
    def controller(self) -> BoundFunction | None:
        """The class that computes the coefficient; None if it is a number."""
        return self.coefficient if isinstance(self.coefficient, BoundFunction) else None

    @property
    def is_beside_the_policy(self) -> bool:
        """Whether its losses are added to the policy loss per token, under the same mean."""
        return self.mask == "response_mask" and self.aggregation is None and self.over == "policy"


class TeacherTopK(_Spec):
    """The K tokens of the vocabulary that ``losses.topk_kl`` and ``topk_jsd`` compare; the rest is one more event."""

    size: int = Field(default=100, ge=1, description="K, at most the vocabulary")
    of: Literal["teacher", "student"] = Field(
        default="teacher", description="whose most likely tokens; the student's are computed before the batch's updates"
    )


class Algorithm(_Spec):
    """The functions of a step's stages: generate, score, filter, shape, advantage, loss, update.

    ``needs`` are the names of the data that the trainer must compute; they are read from the signatures.

    >>> from rlprims import advantage, algorithms
    >>> dapo = algorithms.dapo(max_length=1024, buffer_length=256)
    >>> "ref_log_probs" in dapo.needs, "values" in algorithms.ppo().needs
    (False, True)
    >>> algorithms.diff(dapo, dapo.replace(advantage=advantage.rloo))
    {'advantage.fn': ('rlprims.advantage.grpo', 'rlprims.advantage.rloo'), ...}
    """

    name: str
    group_size: int = Field(default=1, ge=1, description="samples per prompt, G")
    filter: GroupFilter | None = None
    ended: Endings = Field(default=Endings(), description="the treatment of a response, by the reason of its end")
    components: tuple[str, ...] = Field(default=(), description="the verifier's columns in component_scores, in order")
    score_shaping: tuple[BoundFunction, ...] = Field(default=(), description="terms (B,) that are added to the scores")
    kl_in_reward: KLInReward | None = None
    baseline: BoundFunction | None = Field(
        default=None,
        description="class that stores baseline_scores: advantage.ValueTracker, RoleBaseline; null: the score of the "
        "greedy response, if it is needed",
    )
    advantage: BoundFunction
    normalization: BoundFunction | None = Field(default=None, description="of the advantages, over the batch")
    corrections: tuple[BoundFunction, ...] = Field(
        default=(), description="of the gap between sampler and trainer; their product multiplies the policy loss"
    )
    token_selection: BoundFunction | None = Field(default=None, description="the tokens with a policy loss; null: all")
    policy_loss: BoundFunction = use(losses.clipped_surrogate)
    policy_coefficient: float = Field(default=1.0, description="factor of the policy loss, not of the loss terms")
    loss_terms: tuple[LossTerm, ...] = ()
    support: TeacherTopK = Field(default=TeacherTopK(), description="the tokens of divergences to a teacher")
    value_target: BoundFunction | None = Field(default=None, description="critic's target; null: advantages + values")
    value_loss: BoundFunction | None = Field(default=None, description="trains the critic; there if values are needed")
    aggregation: BoundFunction = use(losses.token_mean)
    epochs: int = Field(default=1, ge=1, description="passes over a training batch")
    mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")

    @model_validator(mode="after")
    def _every_hyperparameter_has_a_value(self) -> "Algorithm":
        for stage, part in self.uses():
            if part.unbound:
                raise ValueError(f"{stage}: {part.path} has no value for {sorted(part.unbound)}, expected one for each")
        for stage, part in self.stateful.items():
            methods = ["update", "state_dict", "load_state_dict", *(["baseline"] if stage == "baseline" else [])]
            if missing := [name for name in methods if not callable(getattr(part.fn, name, None))]:
                example = "advantage.ValueTracker" if stage == "baseline" else "controllers.AdaptiveEntropy"
                raise ValueError(f"{stage}: {part.path} has no {missing}: expected a class such as {example}")
        return self

    @property
    def stateful(self) -> dict[str, BoundFunction]:
        """The stages that are objects with a state. A trainer creates each once, and saves its ``state_dict``.

        >>> from rlprims import algorithms
        >>> list(algorithms.spo().stateful)
        ['baseline']
        """
        stages = {stage: part for stage, part in self.uses() if stage.rpartition(".")[2] in _STATEFUL}
        return {stage.removesuffix(".coefficient"): part for stage, part in stages.items()}

    def with_coefficients(self, values: Mapping[str, float]) -> "Algorithm":
        """The algorithm of one step, with these numbers as coefficients of ``loss_terms.0`` and so on.

        >>> from rlprims import algorithms, controllers, losses
        >>> term = {"coefficient": controllers.AdaptiveEntropy, "loss": losses.negative_entropy}
        >>> dapo = algorithms.dapo().replace(loss_terms=[term])
        >>> dapo.with_coefficients({"loss_terms.0": 0.01}).loss_terms[0].coefficient
        0.01
        """
        terms = tuple(
            term.model_copy(update={"coefficient": values.get(f"loss_terms.{i}", term.coefficient)})
            for i, term in enumerate(self.loss_terms)
        )
        return self.model_copy(update={"loss_terms": terms})

    def uses(self) -> Iterator[tuple[str, BoundFunction]]:
        """Every primitive with its stage."""
        parts: list[tuple[str, BoundFunction | None]] = [
            ("filter", self.filter.keep if self.filter else None),
            *((f"score_shaping.{i}", part) for i, part in enumerate(self.score_shaping)),
            ("kl_in_reward", self.kl_in_reward.controller if self.kl_in_reward else None),
            ("baseline", self.baseline),
            ("advantage", self.advantage),
            ("normalization", self.normalization),
            *self._weighing(),
            ("policy_loss", self.policy_loss),
            *((f"loss_terms.{i}", term.loss) for i, term in enumerate(self.loss_terms)),
            *((f"loss_terms.{i}.aggregation", term.aggregation) for i, term in enumerate(self.loss_terms)),
            *((f"loss_terms.{i}.coefficient", term.controller) for i, term in enumerate(self.loss_terms)),
            ("value_target", self.value_target),
            ("value_loss", self.value_loss),
            ("aggregation", self.aggregation),
        ]
        return ((stage, part) for stage, part in parts if part is not None)

    def _weighing(self) -> Iterator[tuple[str, BoundFunction | None]]:
        yield from ((f"corrections.{i}", part) for i, part in enumerate(self.corrections))
        yield "token_selection", self.token_selection
        yield from ((f"loss_terms.{i}.tokens", term.tokens) for i, term in enumerate(self.loss_terms))

    @property
    def needs(self) -> frozenset[str]:
        """The union of the data names in the signatures."""
        names = _union(part for _, part in self.uses()) | {term.mask for term in self.loss_terms}
        if self.kl_in_reward:
            names |= {"ref_log_probs"}
        if self.baseline is not None:
            names -= {"baseline_scores"}  # the object computes them, so no greedy response is needed
        # Before the first update of a batch the policy's log-probs are the old ones.
        reads_old = self.kl_in_reward or self.baseline_measures_kl or "log_probs" in self.token_weight_needs
        return names | {"old_log_probs"} if reads_old else names

    @property
    def needs_teacher(self) -> bool:
        """Whether a part reads a teacher's log-probs, of the sampled tokens or of several, or its hidden states."""
        return bool(self.needs & {"teacher_log_probs", "teacher_topk_log_probs", "teacher_hidden"})

    @property
    def baseline_measures_kl(self) -> bool:
        """Whether the baseline's ``update`` takes ``kl``, of the policy from the one that last answered the prompt."""
        update = getattr(self.baseline.fn, "update", None) if self.baseline is not None else None
        return update is not None and "kl" in inspect.signature(update).parameters

    @property
    def token_weight_needs(self) -> frozenset[str]:
        """The data of corrections and token selections; ``log_probs`` are of the policy before each update."""
        return _union(part for _, part in self._weighing() if part is not None)

    @property
    def loss_needs(self) -> frozenset[str]:
        """The data of the policy loss and of the loss terms. A backend computes some of them with gradients."""
        return _union([self.policy_loss, *(term.loss for term in self.loss_terms)])

    @property
    def token_wise(self) -> bool:
        """Whether each token's loss depends on that token's data only, as ``types.token_wise`` declares for a loss.

        It is False if a loss reads entropies: the fused loss computes entropies without a gradient.
        """
        parts = [self.policy_loss, *(term.loss for term in self.loss_terms)]
        return "entropies" not in self.loss_needs and all(getattr(part.fn, "token_wise", False) for part in parts)

    @property
    def aggregations(self) -> list[BoundFunction]:
        """All aggregations of the objective, that of the policy loss first."""
        return [self.aggregation, *(term.aggregation for term in self.loss_terms if term.aggregation is not None)]

    @property
    def together(self) -> Literal["group_ids", "trajectory_ids"] | None:
        """The ids whose rows must be in one micro-batch; None: rows may be split freely, given :func:`step_counts`.

        A loss that takes ``group_ids`` compares the responses of a group. A loss of whole sequences needs all rows of a
        rollout, and so may an aggregation from outside of this library.

        >>> from rlprims import algorithms
        >>> algorithms.real().together, algorithms.gspo().together, algorithms.grpo().together
        ('group_ids', 'trajectory_ids', None)
        """
        if "group_ids" in self.loss_needs:
            return "group_ids"
        parts = [self.policy_loss, *(term.loss for term in self.loss_terms)]
        parts += [self.value_loss] if self.value_loss is not None else []
        token_wise = all(getattr(part.fn, "token_wise", False) for part in parts)
        known_means = all(mean.path.startswith("rlprims.losses.") for mean in self.aggregations)
        return None if token_wise and known_means else "trajectory_ids"

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.mini_batches

    def replace(self, **changes: Any) -> "Algorithm":
        """A copy with other values, validated. A mapping changes a stage: ``policy_loss={"clip_high": 0.3}``.

        Raises:
            ValueError: an unknown field, a wrong type or an impossible value.
        """
        return parse(merge(self.model_dump(), changes))

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    def to_yaml(self) -> str:
        """The algorithm as YAML. Needs PyYAML (extra ``train``)."""
        import yaml

        return yaml.safe_dump(json.loads(self.to_json()), sort_keys=False)

    @classmethod
    def from_json(cls, text: str) -> "Algorithm":
        return parse(json.loads(text))

    @classmethod
    def from_yaml(cls, text: str) -> "Algorithm":
        import yaml

        return parse(yaml.safe_load(text))


def _union(parts: Iterable[BoundFunction]) -> frozenset[str]:
    return frozenset[str]().union(*(part.needs for part in parts))


def check_algorithm(value: object) -> None:
    """Raise ``ValueError`` unless it is an Algorithm: neither the name of a preset nor a preset that was not called."""
    if not isinstance(value, Algorithm):
        preset = value if isinstance(value, str) else getattr(value, "__name__", "grpo")
        raise ValueError(f"{value!r} is no Algorithm: write algorithms.{preset}(), or another preset")


def parse(fields: Mapping[str, Any]) -> Algorithm:
    """An Algorithm from plain values.

    Raises:
        ValueError: wrong values; the message has a line for each.
    """
    try:
        return Algorithm.model_validate(fields)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'algorithm'}: {_message(e, fields)}" for e in error.errors()]
        raise ValueError("\n".join(lines)) from None


def _message(error: Any, fields: Mapping[str, Any]) -> str:
    if error["type"] != "extra_forbidden" or len(error["loc"]) > 1:
        return str(error["msg"]).removeprefix("Value error, ")
    settings = {name: name for name in Algorithm.model_fields}
    for stage in (name for name in fields if name in Algorithm.model_fields):
        with suppress(ValueError, TypeError):
            settings |= {name: f"{stage}.{name}" for name in use(**fields[stage]).hyperparameters}
    meant = near(str(error["loc"][0]), settings)
    known = ", ".join(sorted(Algorithm.model_fields))
    return f"unknown; did you mean {settings[meant]}?" if meant else f"unknown; choose from {known}"


def merge(base: Any, changes: Any) -> Any:
    """``base`` with ``changes``, key by key. A stage with another ``fn`` has the defaults of that function."""
    if not isinstance(changes, Mapping):
        return changes
    if isinstance(base, str) or callable(base):
        base = {"fn": base}
    is_other_fn = "fn" in changes and isinstance(base, Mapping) and _path(changes["fn"]) != _path(base.get("fn"))
    if not isinstance(base, Mapping) or is_other_fn:
        return changes
    return {**base, **{key: merge(base.get(key), value) for key, value in changes.items()}}


def _path(fn: Any) -> Any:
    """The same path for each spelling of a function; the value itself if it cannot be imported."""
    try:
        return BoundFunction(fn=import_path(fn) if isinstance(fn, str) else fn).path
    except ValueError:  # a wrong path is reported when it is used
        return fn
