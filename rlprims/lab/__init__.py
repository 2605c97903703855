"""For notebooks: recorded rollouts as a batch, and tables and figures that a notebook shows.

Pictures need the extra ``lab``. Files of ``examples`` show the advantage, loss and gradient of each token.
"""

from rlprims.lab._display import Table, figure
from rlprims.lab._rollouts import load_jsonl, load_run, load_trl, load_verl

__all__ = ["Table", "figure", "load_jsonl", "load_run", "load_trl", "load_verl"]
