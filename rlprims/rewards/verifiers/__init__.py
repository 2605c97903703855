"""Verifiers: (response, answer) to a score, or a dict with ``score`` and the columns that filters and logs may name.

A verifier is any function of a response and its answer. Columns of the data that it also wants, such as
``data_source``, are parameters by their names; what follows ``*`` is an option. What a model writes is read and never
run here: code goes to :mod:`rlprims.rewards.sandbox`, and what may not end belongs into :mod:`rlprims.rewards.pool`.
"""

from rlprims.rewards.verifiers._by_source import SOURCES, by_source, check_answer
from rlprims.rewards.verifiers._code import code_asserts, code_stdin
from rlprims.rewards.verifiers._exact import exact
from rlprims.rewards.verifiers._f1 import f1
from rlprims.rewards.verifiers._gsm8k import gsm8k
from rlprims.rewards.verifiers._json_schema import json_schema
from rlprims.rewards.verifiers._math import math
from rlprims.rewards.verifiers._multiple_choice import multiple_choice
from rlprims.rewards.verifiers._numeric import numeric
from rlprims.rewards.verifiers._response_format import response_format
from rlprims.rewards.verifiers._tagged_answer import tagged_answer
from rlprims.rewards.verifiers._thinking import without_thinking

__all__ = [
    "SOURCES",
    "by_source",
    "check_answer",
    "code_asserts",
    "code_stdin",
    "exact",
    "f1",
    "gsm8k",
    "json_schema",
    "math",
    "multiple_choice",
    "numeric",
    "response_format",
    "tagged_answer",
    "without_thinking",
]
