"""The three ways to collect, each with its schedule. P is ``prompts_per_step``, R is ``prompts_per_generation``.

=========  ====================================  ===========================================  ====================
pace       settings                              schedule                                     of
=========  ====================================  ===========================================  ====================
rounds     ``stream: false``                     R groups, in order; none is replaced         a generation batch
groups     ``stream: true``                      the missing groups, those that finish first  a training batch
updates    ``stream: true``, ``max_staleness`` ≥ 2   P groups, max_staleness − 1 ahead, window P + 1  the run
=========  ====================================  ===========================================  ====================

In rounds the groups of a generation batch are filtered together. Otherwise each is filtered by itself, and one that is
dropped is replaced. With ``max_staleness: 1`` the next training batch is sampled as a whole while this one is trained.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from rlprims.trainer.sources.schedule import Schedule
from rlprims.trainer.sources.settings import SamplingSettings

Pace: TypeAlias = Literal["rounds", "groups", "updates"]


def pace_of(config: SamplingSettings) -> Pace:
    if not config.stream:
        return "rounds"
    return "updates" if config.max_staleness > 1 else "groups"


def is_ahead(config: SamplingSettings) -> bool:
    """Whether a whole training batch is collected while the one before it is trained."""
    return config.max_staleness == 1


def generation_limits(config: SamplingSettings) -> tuple[int, int | None]:
    """The groups of a generation batch, and the limit of such batches for a training batch; None: no limit."""
    limits = config.algorithm.filter
    # Without a filter only groups with a score that is not a number are dropped.
    batches = limits.max_generation_batches if limits else 10
    return config.prompts_per_generation or config.prompts_per_step, batches


def schedule_of(config: SamplingSettings, *, first: int = 0, missing: int = 1, most: int | None = None) -> Schedule:
    """The schedule from group ``first`` on, for a training batch that needs ``missing`` groups of at most ``most``."""
    pace, groups = pace_of(config), config.prompts_per_step
    if pace == "updates":
        return Schedule(groups=groups, ahead=config.max_staleness - 1, window=groups + 1)
    if pace == "rounds":
        return Schedule(groups=generation_limits(config)[0], first=first)
    return Schedule(groups=missing, window=None, first=first, most=most)


def check_resumes(state: Mapping[str, Any], pace: Pace) -> None:
    """Raise a ValueError if the state is of a run whose schedule lived longer, or less long."""
    if (pace == "updates") != ("schedule" in state):
        was, wanted = ("0 or 1", "more") if pace == "updates" else ("2 or more", "less")
        change = f"a run of max_staleness {was} cannot be resumed with {wanted}"
        raise ValueError(f"{change}: start a new run from its weights")
