"""Conversion of sampled turns to rows of training data, by exact token ids: no text is tokenized twice.

A rollout is a list of :class:`Turn`: the ids that the sampler was given, the ids that it drew, and their log-probs.
:func:`merge` makes rows from the turns, and :func:`to_batch` makes a batch from the rows. :func:`delta_ids` tokenizes
the messages of an environment between two turns. :func:`explain` shows why a turn did not extend a row. Functions of
tensors with ``turn_ids`` are in :mod:`rlprims.layout`.
"""

from rlprims.turns._batch import to_batch
from rlprims.turns._chat import delta_ids
from rlprims.turns._explain import Explanation, explain
from rlprims.turns._merge import merge
from rlprims.turns._turn import Row, Span, Turn

__all__ = ["Explanation", "Row", "Span", "Turn", "delta_ids", "explain", "merge", "to_batch"]
