"""Environments of verifiers, ``environment: rlprims.interop.verifiers.Verifiers``, and rlprims' for verifiers.

A row names an environment and a row of its data, ``{"name": "wordle", "index": 3}``, from :func:`rows`. Tried with
verifiers 0.3.1, 0.2.1 and 0.1.14, which is imported when the first episode begins. 0.4 is not supported: its
environments do not run in this process; an agent is a separate program that calls the model over HTTP.
"""

from rlprims.interop.verifiers._environment import to_verifiers
from rlprims.interop.verifiers._episode import Verifiers, rows

__all__ = ["Verifiers", "rows", "to_verifiers"]
