"""What the filter will see, found by scoring one response before anything is evaluated or trained."""

import numpy as np

from rlprims.algorithms import filter_column
from rlprims.data_proto import DataProto
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.rewarding import as_columns, ask
from rlprims.trainer.rollout import prompt_rows


def filter_note(config: Config, example: Example) -> str | None:
    """What a user should know of the column that the filter reads; None: it is the one that the config names.

    The verifier is given the answer as the response.

    Raises:
        ValueError: the verifier returns one number, and the filter reads a column beside it.
    """
    algorithm = config.algorithm
    limits = algorithm.filter
    if limits is None or "scores" not in limits.keep.needs or config.replay is not None:
        return None
    rows = prompt_rows([example], [0], copies=1, first_sample=0)
    response = np.array([str(example.answer)], dtype=object)
    rows = rows.union(DataProto.from_dict(tensors={}, non_tensors={"response": response}))
    said = ask(config.verifiers(), rows, config.scoring)
    if not all(part.scores.isfinite().all() for part in said.parts.values()):
        return None
    returned = {"scores", *as_columns(said, flat="verifier_scores")} - {"verifier_scores"}
    scorers = ", ".join(reward.fn.path if reward.fn else str(reward.url) for reward in config.verifiers())
    made = {"shaped_scores", *config.score_parts, *(part.fn.__name__ for part in algorithm.score_shaping)}
    column, metric = filter_column(algorithm, returned | made), limits.metric
    if column == metric:
        return None
    if column is not None:
        return f"{scorers} returns no acc: the filter looks at {column}"
    missing = f"algorithm.filter.metric is {metric!r}, and {scorers} returned {sorted(returned)}"
    if returned == {"scores"}:
        raise ValueError(f"{missing}: write scores, or return a dict with {metric!r}")
    return f"{missing} for the answer of the first question"
