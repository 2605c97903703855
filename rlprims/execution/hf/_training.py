"""The models of a training process: those of its roles are loaded, and measure a batch or do an optimizer step."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor, nn

from rlprims import diagnostics
from rlprims.algorithms import Algorithm, BoundFunction, policy_objective, use, value_objective
from rlprims.controllers import Ema
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, RunNeeds, UpdateReport
from rlprims.execution._observed import metered
from rlprims.execution.hf._adapters import adapt, adapters_off, freeze
from rlprims.execution.hf._alone import window_of
from rlprims.execution.hf._families import sees
from rlprims.execution.hf._forward import fused_objective, head_of, is_sum_of_token_losses, response_values
from rlprims.execution.hf._micro_batches import SINGLE_PROCESS, Part, Ranks, StepTotals, parts_of
from rlprims.execution.hf._models import check_vocabularies, load_causal_lm, load_critic, usable_device
from rlprims.execution.hf._packed import is_packed
from rlprims.execution.hf._router_loss import Forward, with_router_loss
from rlprims.execution.hf._routes import check_routed, replay_routes, without_routes
from rlprims.execution.hf._scorer import Scorer, Teachers, per_token
from rlprims.execution.hf._train_state import Follower, TrainState, optimizer_step
from rlprims.execution.hf._vision import check_same_type, check_vision, with_rates
from rlprims.types import Metrics

P = ParamSpec("P")
R = TypeVar("R")


class Training:
    """The policy; and the reference, the teachers and the critic if the algorithm reads their outputs.

    ``roles`` limits which of them are loaded. With ranks these are this rank's shards, and a batch is this rank's rows.
    Call every method on all ranks in the same order: a forward pass communicates.

    Raises:
        ValueError: a model cannot be loaded, or ``model.fused_head`` or ``model.packing`` does not fit the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        ranks: Ranks = SINGLE_PROCESS,
        roles: Collection[str] = ("actor", "reference", "teacher", "critic"),
        **run: Unpack[RunNeeds],
    ) -> None:
        self.model, self.ranks, self.device = model, ranks, usable_device(model)
        self.temperature = run["temperature"]
        self._policy: TrainState | None = None
        self.critic: TrainState | None = None
        self.reference: nn.Module | None = None
        self.teachers: dict[str, nn.Module] = {}
        needs = run["algorithm"].needs
        needs_reference = "reference" in roles and "ref_log_probs" in needs
        if needs_reference and (model.reference or model.lora is None or "actor" not in roles):
            self.reference = ranks.load(model.reference or model.path, model).requires_grad_(False)
        # FSDP casts shards as it gathers them; adapters are float32 beside frozen weights in any dtype.
        in_float32 = ranks is not SINGLE_PROCESS and model.lora is None
        trained_as = model.model_copy(update={"dtype": "float32"}) if in_float32 else model
        if "actor" in roles:
            if model.lora is None:
                policy = ranks.load(model.path, trained_as)
            else:
                policy = ranks.shard(adapt(load_causal_lm(model.path, trained_as), model.lora))
            if model.replay_routes:
                replay_routes(policy)
            if model.router_aux_loss_coef:
                check_routed(policy, "router_aux_loss_coef: 0")
            self.context_window = window_of(policy.config)
            if sees(model, policy.config):
                check_vision(model, run["algorithm"])
            self._policy = TrainState(policy, with_rates(optimizer, model, policy), run["updates"])
            if needs_reference and self.reference is None:
                self.reference = policy  # with its adapters off
        if "teacher" in roles and run["algorithm"].needs_teacher:
            check_vocabularies(model)
            for name, path in model.teachers.items():
                self.teachers[name] = ranks.load(path, model).requires_grad_(False)
            if "teacher_hidden" in needs:
                sizes = {len(head_of(each).weight) for each in (policy, *self.teachers.values())}
                if len(sizes) > 1:
                    raise ValueError(f"model.teacher: its head and the policy's have {sizes} rows, expected one size")
        if "actor" in roles and sees(model, policy.config):
            check_same_type(policy, self.reference, *self.teachers.values())
        self.followers = self._followers()
        if "critic" in roles and "values" in needs:
            critic = adapt(load_critic(model.critic or model.path, trained_as), model.lora)
            module = ranks.shard(freeze(critic, run.get("critic_freeze", ())))
            updates = run.get("critic_updates") or run["updates"]
            self.critic = TrainState(module, run.get("critic_optimizer") or optimizer, updates)

    @property
    def policy(self) -> TrainState:
        if self._policy is None:
            raise ValueError("no policy was loaded: this pool has other roles")
        return self._policy

    def train_states(self) -> dict[str, TrainState]:
        """The models that are trained, by name. They are saved in a checkpoint."""
        trained = {"policy": self._policy, "critic": self.critic}
        return {name: state for name, state in trained.items() if state is not None}

    def log_probs(
        self, batch: DataProto, *, reference: bool = False, plain: bool = False, temperature: float | None = None
    ) -> Tensor:
        """The log-probs at the sampler's temperature, or at another."""
        if not reference:
            return self._policy_scorer(plain).measured(batch, "log_probs", temperature)
        if self.reference is None:
            raise ValueError("no reference model was loaded: the algorithm does not read ref_log_probs")
        with adapters_off(self.reference):
            return self._scorer(self.reference).measured(without_routes(batch), "log_probs", temperature)

    def entropies(self, batch: DataProto) -> Tensor:
        return self._policy_scorer().measured(batch, "entropies")

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        """int64 (B, T, K): the likeliest tokens of the policy."""
        return self._policy_scorer().top(batch, size)["topk_ids"]

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        """The log-probs of the teacher; if there are several, of the one that the column ``teacher`` names."""
        return self._teachers().log_probs(batch)

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        """``topk_ids`` of the batch or of the teacher, and ``teacher_topk_log_probs`` of these tokens."""
        return self._teachers().top(batch, size)

    def values(self, batch: DataProto) -> Tensor:
        """(B, T): the value of the state in which each response token was sampled."""
        forward = partial(response_values, self._loaded_critic().module)
        return per_token(without_routes(batch), forward, self.model, self.ranks, packing=False)

    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """One optimizer step of the policy. Loss and metrics are this rank's share of those of the whole step."""
        bounds = {k: v for k, v in algorithm.policy_loss.hyperparameters.items() if k in ("clip_low", "clip_high")}

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            loss, scores = self._objective(part, algorithm)
            mask = part["response_mask"]
            metrics: Metrics = {"entropy": diagnostics.mean_over_tokens(scores["entropies"], mask)}
            if "whole_log_probs" in scores:
                metrics |= diagnostics.support_mass(scores["log_probs"], scores["whole_log_probs"], mask)
            if "old_log_probs" in part:
                old, advantages = part["old_log_probs"], part["advantages"]
                metrics |= diagnostics.ratio_stats(scores["log_probs"], old, advantages, mask, **bounds)
            return loss, metrics

        parts = partial(self._parts, batch, is_packed(self.policy.module), algorithm.together)
        report = optimizer_step(self.policy, parts(), totals, self._balanced(forward, parts), self.ranks)
        for follower in self.followers:
            follower.ema.update(dict(follower.module.named_parameters()), dict(self.policy.module.named_parameters()))
        return report

    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """The same for the critic."""
        critic = self._loaded_critic()

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            return value_objective(algorithm, {**part, "new_values": response_values(critic.module, part)}), {}

        parts = self._parts(without_routes(batch), False, algorithm.together)
        return optimizer_step(critic, parts, totals, forward, self.ranks)

    def save_followers(self, directory: Path) -> None:
        """Write the models that follow the policy, for Hugging Face, and their counts."""
        for follower in self.followers:
            follower.save(directory)

    def load_followers(self, directory: Path) -> None:
        for follower in self.followers:
            follower.load(directory)

    def _objective(self, part: dict[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's objective on a micro-batch, and the token scores that it was computed from."""
        model, module = self.model, self.policy.module
        if model.fused_head and is_sum_of_token_losses(algorithm):
            compute = partial(fused_objective, temperature=self.temperature, packing=is_packed(module))
            return self.ranks.within(module, partial(compute, module, part, algorithm))  # type: ignore[no-any-return]
        more = [name for name in ("topk_log_probs", "hidden") if name in algorithm.loss_needs]
        wanted = ["log_probs", "entropies", *more, *(["whole_log_probs"] if "kept" in part else [])]
        entropy_gradient = "entropies" in algorithm.loss_needs
        scores = self._policy_scorer().token_scores(part, wanted, entropy_gradient=entropy_gradient)
        if "teacher_hidden" in algorithm.loss_needs:
            algorithm, part = self._beside_the_teacher(algorithm, part)
        return policy_objective(algorithm, {**part, **scores}), scores

    def _beside_the_teacher(self, algorithm: Algorithm, part: dict[str, Any]) -> tuple[Algorithm, dict[str, Any]]:
        """A micro-batch with the teacher's hidden states and both heads; losses that read them get the run's scales."""
        (teacher,) = self._teachers().scorers.values()
        with torch.no_grad():
            part = {**part, "teacher_hidden": teacher.token_scores(part, ["hidden"])["hidden"]}
        head, its_head = head_of(self.policy.module), head_of(teacher.module)
        scale = {"temperature": self.temperature, "soft_cap": head.soft_cap, "teacher_soft_cap": its_head.soft_cap}

        def scaled(loss: BoundFunction) -> BoundFunction:
            return use(loss.fn, **{**scale, **dict(loss.bound)}) if "teacher_hidden" in loss.needs else loss

        terms = tuple(term.model_copy(update={"loss": scaled(term.loss)}) for term in algorithm.loss_terms)
        algorithm = algorithm.model_copy(update={"policy_loss": scaled(algorithm.policy_loss), "loss_terms": terms})
        return algorithm, {**part, "head_weight": head.weight, "teacher_head_weight": its_head.weight}

    def _balanced(self, forward: Forward, parts: Callable[[], Iterable[Part]]) -> Forward:
        is_on = self.model.router_aux_loss_coef > 0
        return with_router_loss(forward, parts, self._policy_scorer()) if is_on else forward

    def _parts(self, batch: DataProto, packing: bool, together: str | None) -> Iterator[Part]:
        return parts_of(batch, self.model, self.ranks, packing=packing, together=together)

    def _scorer(self, module: nn.Module, plain: bool = False) -> Scorer:
        model = self.model.model_copy(update={"packing": False, "fused_head": False}) if plain else self.model
        return Scorer(module, model, self.ranks, self.temperature)

    def _policy_scorer(self, plain: bool = False) -> Scorer:
        return self._scorer(self.policy.module, plain)

    def _teachers(self) -> Teachers:
        return Teachers({name: self._scorer(module) for name, module in self.teachers.items()}, self.ranks)

    def _loaded_critic(self) -> TrainState:
        if self.critic is None:
            raise ValueError("no critic was loaded: the algorithm does not read values")
        return self.critic

    def _followers(self) -> list[Follower]:
        """The reference and the teacher, if they follow the policy."""
        found = []
        teacher = next(iter(self.teachers.values()), None)
        for role, module, follows in (
            ("reference", self.reference, self.model.reference_follows),
            ("teacher", teacher, self.model.teacher_follows),
        ):
            if follows is None or module is None:
                continue
            if self.ranks is not SINGLE_PROCESS:
                raise ValueError(f"model.{role}_follows: expected execution: local, got ranks. Leave it out")
            found.append(Follower(role, module, Ema(rate=follows.rate, every=follows.every)))
        return found


def of_training(verb: Callable[Concatenate[Training, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that calls this one of ``self.training``, and counts the work."""

    @metered
    @wraps(verb)
    def call(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return verb(owner.training, *args, **kwargs)

    return call
