"""For notebooks: recorded rollouts as a batch, and tables, pages and figures that a notebook shows.

Pictures need the extra ``lab``. Files of ``examples`` show the advantage, loss and gradient of each token.
"""

from rlprims.lab._display import Page, Table, figure
from rlprims.lab._rollouts import load_jsonl, load_run, load_trl, load_verl

__all__ = ["Page", "Table", "figure", "load_jsonl", "load_run", "load_trl", "load_verl"]
