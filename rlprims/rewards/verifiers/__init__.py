"""Verifiers: functions of a response and its answer that return a score, or a dict with ``score`` and other columns.

Filters and logs can use the other columns by name. A verifier is any function of a response and its answer. If it needs
further columns of the data, such as ``data_source``, it has parameters with their names; parameters after ``*`` are
options. Verifiers never run text of the model: code runs in :mod:`rlprims.rewards.sandbox`. Call verifiers that may not
end in a :mod:`rlprims.rewards.pool`.
"""

from rlprims._near import suggest_attributes
from rlprims.rewards.verifiers._by_source import SOURCES, by_source, check_answer
from rlprims.rewards.verifiers._code import code_asserts, code_stdin
from rlprims.rewards.verifiers._math import math
from rlprims.rewards.verifiers._multiple_choice import multiple_choice
from rlprims.rewards.verifiers._numeric import gsm8k, numeric
from rlprims.rewards.verifiers._texts import exact, f1, json_schema, response_format, tagged_answer
from rlprims.rewards.verifiers._thinking import without_thinking

__all__ = [
    "SOURCES", "by_source", "check_answer", "code_asserts", "code_stdin", "exact", "f1", "gsm8k", "json_schema",
    "math", "multiple_choice", "numeric", "response_format", "tagged_answer", "without_thinking",
]  # fmt: skip

suggest_attributes(__name__, __all__)
