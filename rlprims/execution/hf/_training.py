"""The models of a training process: those of its roles are loaded, and measure a batch or do an optimizer step."""

from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from torch import Tensor, nn

from rlprims.algorithms import Algorithm
from rlprims.controllers import Ema
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, RunNeeds, UpdateReport
from rlprims.execution._observed import metered
from rlprims.execution.hf._adapters import adapt, adapters_off
from rlprims.execution.hf._critic import Critic
from rlprims.execution.hf._micro_batches import SINGLE_PROCESS, Ranks, StepTotals
from rlprims.execution.hf._models import check_vocabularies, load_causal_lm, load_critic, usable_device
from rlprims.execution.hf._policy import Follower, Policy
from rlprims.execution.hf._routes import replay_routes, without_routes
from rlprims.execution.hf._scorer import Scorer, Teachers
from rlprims.execution.hf._train_state import TrainState

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
        self._policy: Policy | None = None
        self._critic: Critic | None = None
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
            self.context_window = int(getattr(policy.config, "max_position_embeddings", 2**31))
            self._policy = Policy(self._scorer(policy), TrainState(policy, optimizer, run["updates"]))
            if needs_reference and self.reference is None:
                self.reference = policy  # with its adapters off
        if "teacher" in roles and run["algorithm"].needs_teacher:
            check_vocabularies(model)
            for name, path in model.teachers.items():
                self.teachers[name] = ranks.load(path, model).requires_grad_(False)
        self.followers = self._followers()
        if "critic" in roles and "values" in needs:
            module = ranks.shard(adapt(load_critic(model.critic or model.path, trained_as), model.lora))
            updates = run.get("critic_updates") or run["updates"]
            state = TrainState(module, run.get("critic_optimizer") or optimizer, updates)
            self._critic = Critic(state, model, ranks)

    @property
    def policy(self) -> TrainState:
        return self._loaded_policy().state

    @property
    def critic(self) -> TrainState | None:
        return None if self._critic is None else self._critic.state

    def train_states(self) -> dict[str, TrainState]:
        """The models that are trained, by name. They are saved in a checkpoint."""
        trained = {"policy": self._policy, "critic": self._critic}
        return {name: each.state for name, each in trained.items() if each is not None}

    def log_probs(self, batch: DataProto, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """The log-probs at the sampler's temperature, or at another."""
        if not reference:
            return self._loaded_policy().scorer.log_probs(batch, temperature)
        if self.reference is None:
            raise ValueError("no reference model was loaded: the algorithm does not read ref_log_probs")
        with adapters_off(self.reference):
            return self._scorer(self.reference).log_probs(without_routes(batch), temperature)

    def entropies(self, batch: DataProto) -> Tensor:
        return self._loaded_policy().scorer.entropies(batch)

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        """int64 (B, T, K): the likeliest tokens of the policy."""
        return self._loaded_policy().scorer.top(batch, size)["topk_ids"]

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        """The log-probs of the teacher; if there are several, of the one that the column ``teacher`` names."""
        return self._teachers().log_probs(batch)

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        """``topk_ids`` of the batch or of the teacher, and ``teacher_topk_log_probs`` of these tokens."""
        return self._teachers().top(batch, size)

    def values(self, batch: DataProto) -> Tensor:
        return self._loaded_critic().values(batch)

    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """One optimizer step of the policy. Loss and metrics are this rank's share of those of the whole step."""
        report = self._loaded_policy().update(batch, algorithm, totals)
        for follower in self.followers:
            follower.follow(dict(self.policy.module.named_parameters()))
        return report

    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        return self._loaded_critic().update(batch, algorithm, totals)

    def save_followers(self, directory: Path) -> None:
        """Write the models that follow the policy, for Hugging Face, and their counts."""
        for follower in self.followers:
            follower.save(directory)

    def load_followers(self, directory: Path) -> None:
        for follower in self.followers:
            follower.load(directory)

    def _scorer(self, module: nn.Module) -> Scorer:
        return Scorer(module, self.model, self.ranks, self.temperature)

    def _teachers(self) -> Teachers:
        return Teachers({name: self._scorer(module) for name, module in self.teachers.items()}, self.ranks)

    def _loaded_policy(self) -> Policy:
        if self._policy is None:
            raise ValueError("no policy was loaded: this pool has other roles")
        return self._policy

    def _loaded_critic(self) -> Critic:
        if self._critic is None:
            raise ValueError("no critic was loaded: the algorithm does not read values")
        return self._critic

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
