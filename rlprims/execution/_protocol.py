"""The protocols of an execution: the verbs of the training loop, and what logs and profiles read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, Self, TypeAlias

from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ProfileConfig, Sampling
from rlprims.execution._meter import WorkerReport
from rlprims.execution._profile import Profile
from rlprims.types import Metrics


class ExecutionError(RuntimeError):
    """A process that runs the models failed or was lost; a run can be resumed from its newest checkpoint."""


Finish: TypeAlias = Callable[[], Mapping[str, str]]
"""Waits until a save is complete on the disk, in any thread. Returns the SHA-256 of the files that the writers hashed,
by their paths in the directory."""


def finished() -> Mapping[str, str]:
    """The :data:`Finish` of a save that is complete already, and hashed nothing."""
    return {}


class UpdateReport(NamedTuple):
    """One optimizer step."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    """The gradient was not finite, so the weights did not change."""
    metrics: Metrics


class Stream(Protocol):
    """Prompts that are sampled independently of each other, each part with its answer as soon as it is complete.

    Use it in a ``with`` statement, whose end abandons what still runs. Until then ``sync_weights`` waits; or with
    ``over_updates`` the responses go on under the new weights, and ``versions`` (B, T) has those of each token::

        with execution.stream(sampling, seed=0, prompt_width=64) as stream:
            numbers = [stream.submit(group) for group in groups]
            for number, rows in stream.take().items():
                ...
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def submit(self, prompts: DataProto) -> int:
        """Begin the prompts' responses; the number of this part."""
        ...

    def take(self) -> dict[int, DataProto]:
        """Wait for a part that was submitted and not taken. All that are complete, by number: rows as of ``generate``.

        Raises:
            ValueError: there is none to wait for.
        """
        ...


class Execution(Protocol):
    """The models of a run, by the verbs of the loop. The backend owns micro-batches, packing, precision and ranks.

    Prompts come with ``prompt_ids`` (object column, lists of ints) and ``sample_id`` (int64): a sample's randomness is
    a function of the run's seed and its id, and does not depend on its batch or on earlier calls.
    A batch of responses has ``prompts`` (B, P) left-padded, ``responses`` (B, T) right-padded, ``attention_mask``
    (B, P+T), ``response_mask`` (B, T), ``rollout_log_probs`` (B, T), ``ended`` int8 (B,), the reason of its end (codes
    of :class:`rlprims.ended.Ended`), and ``weights_version`` (B,), of the weights that sampled it. If ``sampling``
    truncates it also has the set that each token was drawn from, in ``kept_counts`` int32 (B, T) and ``kept_ids``
    int32, ragged (B, *): log-probs, entropies and updates are within it.
    """

    pad_token_id: int
    context_window: int
    overlaps: bool
    """Whether ``generate`` may be called from another thread during updates: the sampler has weights of its own."""

    @property
    def weights_version(self) -> int:
        """Of the sampler's weights: 1 at the start, and one more with each :meth:`sync_weights`."""
        ...

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        """The prompts' rows with a response each; ``prompts`` are padded to ``prompt_width``."""
        ...

    def stream(self, sampling: Sampling, *, seed: int, prompt_width: int, over_updates: bool = False) -> Stream:
        """The same responses, for prompts that are not all known at the beginning."""
        ...

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        """(B, T), of the current policy or of the frozen reference."""
        ...

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        """(B, T), of the teacher at the sampler's temperature; the column ``teacher`` chooses one of several."""
        ...

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        """int (B, T, K), the policy's likeliest tokens, for ``topk_ids``."""
        ...

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        """``topk_ids`` (B, T, K), the batch's or else the teacher's likeliest, and ``teacher_topk_log_probs`` there."""
        ...

    def entropies(self, batch: DataProto) -> Tensor:
        """(B, T), of the current policy."""
        ...

    def values(self, batch: DataProto) -> Tensor:
        """(B, T), of the current critic."""
        ...

    def reward_scores(self, batch: DataProto) -> Tensor:
        """(B,), of the reward model; NaN for a row that it cannot read. For a template the batch has ``question`` and
        ``response`` as text."""
        ...

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        """One optimizer step of the policy on the whole batch."""
        ...

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        """One optimizer step of the critic on the whole batch."""
        ...

    def sync_weights(self) -> None:
        """Give the policy's weights to the sampler."""
        ...

    def close(self) -> None:
        """Release all resources; no other method may be called afterwards."""
        ...

    def save(self, directory: Path) -> Finish:
        """Write all state and its version into an empty directory. The state is that of the call; the files may be
        complete only when the result, called, has returned: updates may run until then, another save may not.

        The policy is a Hugging Face model in ``policy``, or shards in ``policy_shards``, of which
        :func:`rlprims.execution.hf.export_model` makes one.
        """
        ...

    def load(self, directory: Path) -> None:
        """Read the state that :meth:`save` wrote."""
        ...


class Observable(Protocol):
    """The processes that run the models, for logs and profiles. The loop itself does not need these."""

    def reports(self) -> list[WorkerReport]:
        """The work of each process since the last call, and its memory."""
        ...

    def start_profile(self, config: ProfileConfig) -> None:
        """Start a profile in every process except the caller's."""
        ...

    def stop_profile(self) -> dict[str, Profile]:
        """The profile of each process that :meth:`start_profile` reached, by the name of the process.

        A process that was replaced in between has none.
        """
        ...
