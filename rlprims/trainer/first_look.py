"""The columns that the filter will get, found by scoring one response before any evaluation or training."""

from rlprims.algorithms import filter_column
from rlprims.data_proto import DataProto
from rlprims.trainer.collect.rollout import prompt_rows, verify
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example


def filter_note(config: Config, example: Example) -> str | None:
    """A note about the column that the filter reads; None if it is the one in the config.

    The verifier is given the answer as the response.

    Raises:
        ValueError: the verifier returns one number, and the filter reads a column beside it.
    """
    algorithm = config.algorithm
    limits = algorithm.filter
    if limits is None or "scores" not in limits.keep.needs or config.replay is not None:
        return None
    if config.data.environment is not None or config.rewards:
        return None  # an environment cannot be tried without a model, and several rewards are weighed to one score
    verifier = config.asked_in_evaluation
    rows = prompt_rows([example], [0], copies=1, first_sample=0)
    rows = rows.union(DataProto.from_dict(non_tensors={"response": [str(example.answer)]}))
    scored = verify(verifier, rows, config.scoring)
    if not scored["scores"].isfinite().all():
        return None
    returned = scored.batch.keys() - rows.batch.keys()
    made = {"shaped_scores", *config.score_parts, *(part.fn.__name__ for part in algorithm.score_shaping)}
    column, metric = filter_column(algorithm, returned | made), limits.metric
    if column == metric:
        return None
    if column is not None:
        return f"{verifier.path} returns no acc: the filter looks at {column}"
    missing = f"algorithm.filter.metric is {metric!r}, and {verifier.path} returned {sorted(returned)}"
    if returned == {"scores"}:
        raise ValueError(f"{missing}: write scores, or return a dict with {metric!r}")
    return f"{missing} for the answer of the first question"
