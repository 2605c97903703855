"""For notebooks: recorded rollouts as a batch. Files of ``examples`` show what an algorithm does with them."""

from rlprims.lab._rollouts import load_jsonl, load_run, load_trl, load_verl

__all__ = ["load_jsonl", "load_run", "load_trl", "load_verl"]
