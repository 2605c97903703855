"""For notebooks: recorded rollouts as a batch, and tables. Files of ``examples`` are built on them."""

from rlprims.lab._display import Table
from rlprims.lab._rollouts import load_jsonl, load_run, load_trl, load_verl

__all__ = ["Table", "load_jsonl", "load_run", "load_trl", "load_verl"]
