"""One process, one device: a Hugging Face causal language model that samples, scores and is trained."""

from rlprims.execution.local._execution import LocalExecution

__all__ = ["LocalExecution"]
