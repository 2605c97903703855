"""What a trainer asks of the machines, and nothing more."""

from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ProfileConfig, Sampling
from rlprims.execution._meter import WorkerReport
from rlprims.execution._profile import Profile
from rlprims.types import Metrics


class ExecutionError(RuntimeError):
    """What runs the models has failed or is lost; a run can go on from its newest checkpoint."""


class UpdateReport(NamedTuple):
    """One optimizer step."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    """The gradient was not finite, so the weights are as they were."""
    metrics: Metrics


class Execution(Protocol):
    """The models of a run. The backend owns micro-batches, packing, precision, clipping and ranks.

    Prompts come with ``prompt_ids`` (object column, lists of ints) and ``sample_id`` (int64): a sample's randomness is
    a function of the run's seed and its id, whatever batch it is in and however often it is asked for.
    A batch of responses has ``prompts`` (B, P) left-padded, ``responses`` (B, T) right-padded, ``attention_mask``
    (B, P+T), ``response_mask`` (B, T), ``rollout_log_probs`` (B, T), ``ended`` int8 (B,), why (codes of
    :class:`rlprims.ended.Ended`), and ``weights_version`` (B,), of the weights that made it. Where ``sampling``
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

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        """(B, T), of the policy as it is or of the frozen reference."""
        ...

    def entropies(self, batch: DataProto) -> Tensor:
        """(B, T), of the policy as it is."""
        ...

    def values(self, batch: DataProto) -> Tensor:
        """(B, T), of the critic as it is."""
        ...

    def reward_scores(self, batch: DataProto) -> Tensor:
        """(B,), of the reward model; NaN where it cannot read a row. For a template the batch has ``question`` and
        ``response`` as text."""
        ...

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        """One optimizer step of the policy on the whole batch."""
        ...

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        """One optimizer step of the critic on the whole batch."""
        ...

    def sync_weights(self) -> None:
        """The sampler uses the policy's weights from here on."""
        ...

    def reports(self) -> list[WorkerReport]:
        """What each worker did since it was last asked."""
        ...

    def start_profile(self, config: ProfileConfig) -> None:
        """Watch every process but the caller's."""
        ...

    def stop_profile(self) -> dict[str, Profile]:
        """By worker, what :meth:`start_profile` began; a worker that was replaced meanwhile has none."""
        ...

    def close(self) -> None:
        """Give back what it holds; nothing is asked of it afterwards."""
        ...

    def save(self, directory: Path) -> None:
        """All state and its version into an empty directory; the policy as a Hugging Face model in ``policy``."""
        ...

    def load(self, directory: Path) -> None:
        """The state that :meth:`save` wrote."""
        ...
