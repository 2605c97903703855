"""Environments of verifiers, ``environment: rlprims.interop.verifiers.Verifiers``, and ours within verifiers.

A row names an environment and a row of its data, ``{"name": "wordle", "index": 3}``: :func:`rows` makes them. Tried
with verifiers 0.3.1, 0.2.1 and 0.1.14, imported when the first episode begins. 0.4 has no environments that run in this
process: there an agent is a program of its own that calls the model over HTTP.
"""

from rlprims.interop.verifiers._environment import to_verifiers
from rlprims.interop.verifiers._episode import Verifiers, rows

__all__ = ["Verifiers", "rows", "to_verifiers"]
