"""The protocols of an execution: one for the policy and one for each model beside it, and one for logs."""

import json
from collections.abc import Callable, Mapping
from itertools import accumulate, count
from pathlib import Path
from typing import NamedTuple, NotRequired, Protocol, Self, TypeAlias, TypedDict

from einops import repeat
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import OptimizerConfig, ProfileConfig, Sampling
from rlprims.execution._observed import Profile, WorkerReport
from rlprims.types import Metrics


class ExecutionError(RuntimeError):
    """A process that runs the models failed or was lost; a run can be resumed from its newest checkpoint."""

    call: DataProto | None = None  # that failed: its batch, with the rest in ``meta_info["failed_call"]``


Finish: TypeAlias = Callable[[], Mapping[str, str]]
"""Waits until a save is complete on the disk, in any thread. Returns SHA-256s of files by path."""


def finished() -> Mapping[str, str]:
    """The :data:`Finish` of a save that is complete already, and hashed nothing."""
    return {}


class RunNeeds(TypedDict):
    """What a run asks of an execution, beside the settings of its models."""

    algorithm: Algorithm
    """It decides which models are loaded."""
    temperature: float
    """The sampler's: log-probs and entropies are those of the distribution that it samples from."""
    updates: int
    """The optimizer steps of the policy in the whole run, for the schedule of its learning rate."""
    sampling: NotRequired[tuple[Sampling, ...]]
    """That of responses to train on, and of evaluations, to be checked before workers start."""
    critic_optimizer: NotRequired[OptimizerConfig | None]
    """None: the policy's."""
    critic_updates: NotRequired[int | None]
    """None: those of the policy."""
    critic_freeze: NotRequired[tuple[str, ...]]
    """Parts of names; the critic's weights with one in their name are not trained."""
    images: NotRequired[bool]
    """Whether rows have images: a cluster loads the part of a model that reads them only then."""


class UpdateReport(NamedTuple):
    """The result of one optimizer step."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    """The gradient was not finite, so the weights did not change."""
    metrics: Metrics


class Stream(Protocol):
    """Parts of prompts that are sampled independently of each other; the responses of a part come when all have ended.

    Use it in a ``with`` statement; its end stops the requests that still run. Until then ``sync_weights`` waits. With
    ``over_updates`` it does not: responses go on with the new weights, and ``versions`` (B, T) has each token's::

        with execution.stream(sampling, seed=0, prompt_width=64) as stream:
            numbers = [stream.submit(group) for group in groups]
            for number, rows in stream.take().items():
                ...
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def submit(self, prompts: DataProto) -> int:
        """Begin the prompts' responses, and return the number of this part."""

    def take(self, timeout: float | None = None) -> dict[int, DataProto]:
        """Wait until a part is complete; returns all complete parts by their numbers, in rows like ``generate``'s.

        After ``timeout`` seconds it returns without a part. A sampler of whole batches ignores the timeout.

        Raises:
            ValueError: all parts that were submitted have been taken.
        """


class Execution(Protocol):
    """The policy, by the verbs of the loop. The backend owns micro-batches, packing, precision and ranks.

    Prompts come with ``prompt_ids`` (object column, lists of ints) and ``sample_id`` (int64): a sample's randomness is
    a function of the run's seed and its id, and does not depend on its batch or on earlier calls.
    A batch of responses has ``prompts`` (B, P) left-padded, ``responses`` (B, T) right-padded, ``attention_mask``
    (B, P+T), ``response_mask`` (B, T), ``rollout_log_probs`` (B, T), ``ended`` int8 (B,), the reason why the response
    ended (codes of :class:`rlprims.ended.Ended`), and ``weights_version`` (B,), the version of the weights that sampled
    it. If ``sampling`` truncates, the batch also has the set that each token was drawn from, in ``kept_counts`` int32
    (B, T) and ``kept_ids`` int32, ragged (B, *). Log-probs, entropies and updates are then within these sets. With
    ``model.replay_routes`` it has ``routed_experts`` int16 (B, P+T, L, K), the experts of each token that was read, and
    the policy's log-probs, entropies and updates use them.
    """

    pad_token_id: int
    context_window: int
    tolerance: float
    """The largest mean difference of log-probs, in nats, that the dtype explains."""
    overlaps: bool
    """Whether ``generate`` may be called from another thread during updates: the sampler has weights of its own."""

    @property
    def weights_version(self) -> int:
        """The version of the sampler's weights: 1 at the start, and one more after each :meth:`sync_weights`."""

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        """The prompts' rows with one response each; ``prompts`` are padded to ``prompt_width``, or to the longest."""

    def stream(self, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False) -> Stream:
        """The same responses, for prompts that are not all known at the beginning."""

    def log_probs(self, batch: DataProto, *, reference: bool = False, plain: bool = False) -> Tensor:
        """(B, T): the log-probs of the current policy, or of the reference.

        ``plain``: the policy's by the model's own forward pass, without packing and fused head.
        """

    def entropies(self, batch: DataProto) -> Tensor:
        """(B, T): the entropies of the current policy."""

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        """One optimizer step of the policy on the whole batch."""

    def sync_weights(self) -> None:
        """Give the policy's weights to the sampler."""

    def save(self, directory: Path) -> Finish:
        """Write all state and its version to an empty directory. The state is that of this call.

        The files are complete when the returned function has been called and has returned. Until then the model may be
        updated, but not saved again. The policy is a Hugging Face model in ``policy``, or shards in ``policy_shards``,
        from which :func:`rlprims.execution.hf.export_model` makes one.
        """

    def load(self, directory: Path) -> None:
        """Read the state that :meth:`save` wrote."""

    def close(self) -> None:
        """Release all resources; no other method may be called afterwards."""


class Critic(Protocol):
    """A model of values, for algorithms that read ``values``."""

    def values(self, batch: DataProto) -> Tensor:
        """(B, T): the values of the current critic."""

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        """One optimizer step of the critic on the whole batch."""


class Teacher(Protocol):
    """One or several models that the policy is distilled from. The column ``teacher`` chooses one of several."""

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        """(B, T): the log-probs of the teacher, at the sampler's temperature."""

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        """``teacher_topk_log_probs`` (B, T, K) of ``topk_ids``: the batch's, or the teacher's ``size`` likeliest."""

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        """int (B, T, K): the likeliest tokens of the policy, for ``topk_ids``."""


class RewardScorer(Protocol):
    """A reward model."""

    def reward_scores(self, batch: DataProto) -> Tensor:
        """(B,): the scores; NaN for a row that it cannot read. A template reads ``question`` and ``response``."""


class Models(Execution, Critic, Teacher, RewardScorer, Protocol):
    """All models that an algorithm may need. A method is called only if algorithm or config need its model."""


class Observable(Protocol):
    """The processes that run the models, for logs and profiles. The loop itself does not need these."""

    def reports(self) -> list[WorkerReport]:
        """The work of each process since the last call, and its memory."""

    def start_profile(self, config: ProfileConfig) -> None:
        """Start a profile in every process except the caller's."""

    def stop_profile(self) -> dict[str, Profile]:
        """The profiles that :meth:`start_profile` began, by process, without those that were replaced meanwhile."""


_VERSION_FILE = "weights_version.json"


def save_version(directory: Path, version: int) -> None:
    """Write the version of the sampler's weights to a checkpoint, so that samples that wait there keep their age."""
    (directory / _VERSION_FILE).write_text(json.dumps(version))


def load_version(directory: Path) -> int:
    return int(json.loads((directory / _VERSION_FILE).read_text()))


class BatchStream:
    """:class:`Stream` for a sampler of whole batches: the next batch is all that was submitted."""

    def __init__(self, generate: Callable[[DataProto], DataProto], *, versions: bool = False) -> None:
        self.generate, self.versions, self._numbers = generate, versions, count()
        self._submitted: dict[int, DataProto] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._submitted.clear()

    def submit(self, prompts: DataProto) -> int:
        number = next(self._numbers)
        self._submitted[number] = prompts
        return number

    def take(self, timeout: float | None = None) -> dict[int, DataProto]:
        if not self._submitted:
            raise ValueError("expected a part that was submitted and not taken, got none")
        submitted, self._submitted = self._submitted, {}
        rows = self.generate(DataProto.concat(list(submitted.values())))
        if self.versions:  # all tokens of a batch have the same version
            rows["versions"] = repeat(rows["weights_version"], "b -> b t", t=rows["responses"].shape[1]).clone()
        parts = zip(submitted.items(), accumulate(map(len, submitted.values())), strict=True)
        return {number: rows[end - len(part) : end] for (number, part), end in parts}
