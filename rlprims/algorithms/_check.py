"""Lints: combinations that run and do not mean what they seem to."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from rlprims import advantage, losses, rewards
from rlprims.algorithms._algorithm import Algorithm


class Finding(NamedTuple):
    """One finding; an error means that the algorithm cannot learn as written."""

    severity: Literal["error", "warning"]
    message: str


_WHITENED = (advantage.gdpo, advantage.reinforce_pp, advantage.reinforce_pp_baseline)
"""Estimators that normalize over the batch themselves."""


def check(algorithm: Algorithm) -> list[Finding]:
    """All findings, errors first.

    >>> from rlprims import algorithms
    >>> check(algorithms.grpo(kl_coef=0.0).replace(group_size=1))[0].message
    'advantage.grpo compares the samples of a prompt, and group_size is 1: every advantage would be 0'
    """
    return sorted([*_errors(algorithm), *_warnings(algorithm)], key=lambda finding: finding.severity)


def _errors(a: Algorithm) -> Iterator[Finding]:
    def error(message: str) -> Finding:
        return Finding("error", message)

    compares = "group_ids" in a.advantage.needs
    if compares and a.group_size == 1:
        yield error(
            f"{_short(a.advantage.path)} compares the samples of a prompt, and group_size is 1: "
            "every advantage would be 0"
        )
    if a.filter and a.group_size == 1:
        yield error("filter looks at differences within a group, and group_size is 1: every group would be dropped")
    if "values" in a.advantage.needs and a.value_loss is None:
        yield error(f"{_short(a.advantage.path)} needs values, and no value_loss trains the critic")
    if a.value_loss is not None and "values" not in a.advantage.needs:
        yield error(f"value_loss trains a critic that {_short(a.advantage.path)} does not read: remove it")


def _warnings(a: Algorithm) -> Iterator[Finding]:
    def warning(message: str) -> Finding:
        return Finding("warning", message)

    kl_terms = [term for term in a.loss_terms if term.loss.fn is losses.kl]
    if a.kl_in_reward and kl_terms:
        yield warning("the KL is in the reward and in the loss: it is paid twice")
    for term in kl_terms:
        knobs = term.loss.hyperparameters
        if (knobs["gradient"] or knobs["value"]) == "k1":
            yield warning("k1 as a loss has an expected gradient of 0 and regularizes nothing: use gradient='k2'")
    scales = a.advantage.hyperparameters.get("normalize_std", False) or a.advantage.fn in _WHITENED
    if scales and a.normalization is not None:
        yield warning("the advantages are divided by a std and normalized over the batch again")
    overlong = any(part.fn is rewards.overlong_penalty for part in a.score_shaping)
    if overlong and scales and a.filter is None:
        yield warning(
            "overlong_penalty without a group filter: in groups that are wrong throughout only the length differs, "
            "the std blows that up to ±1, and the policy learns to be short"
        )
    if overlong and a.filter and a.filter.metric in ("shaped_scores", "rewards"):
        yield warning(
            f"the filter looks at {a.filter.metric}, which holds the overlong penalty, so groups that are wrong "
            "throughout pass by their lengths: filter on acc or scores"
        )
    if a.policy_loss.fn in (losses.gspo, losses.gmpo) and a.aggregation.fn is losses.token_mean:
        name = _short(a.policy_loss.path)
        yield warning(f"{name} with token_mean weighs a response by its length: use seq_mean_token_mean")
    if a.policy_loss.fn is losses.gspo and a.policy_loss.hyperparameters["clip_high"] >= 0.1:
        yield warning("gspo clips a mean over the response, which clip_high >= 0.1 never does: the paper has 4e-4")
    if a.policy_loss.fn is losses.reinforce and a.updates_per_batch > 1:
        yield warning("losses.reinforce corrects nothing after the first update of a batch: use clipped_surrogate")


def _short(path: str) -> str:
    return path.removeprefix("rlprims.")
