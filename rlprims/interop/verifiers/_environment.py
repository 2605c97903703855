"""Conversion of an rlprims environment to an environment of verifiers."""

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rlprims.environments import Environment, Step
from rlprims.environments._ask import Asker
from rlprims.environments._tools import schemas_of
from rlprims.interop.verifiers._messages import as_ours, with_call_ids
from rlprims.interop.verifiers._package import package


def to_verifiers(
    make: Callable[..., Environment],
    data: Sequence[Mapping[str, Any]],
    *,
    eval_data: Sequence[Mapping[str, Any]] | None = None,
    columns: Sequence[str] = (),
    max_turns: int = 8,
    seconds: float = 60.0,
    **options: Any,
) -> Any:
    """A ``verifiers.MultiTurnEnv`` that runs an rlprims environment; return it from a ``load_environment``.

    The reward is the sum of the rewards of all steps; each is also the reward of its step in the trajectory. The
    environment answers every message, also the last of ``max_turns``. An exception becomes ``error`` in the state.

    Args:
        make: the class of the environment, called with the fields of a row.
        data: rows to train on.
        eval_data: rows to evaluate on; None: ``data``.
        columns: the columns that become metrics; 0 if an episode does not have them.
        max_turns: the largest number of messages of the model; -1: no limit.
        seconds: the time limit of all calls of the environment in an episode.
        options: other arguments of ``MultiTurnEnv``.
    """
    return _environment_class(make, seconds)(
        dataset=_data_set(data),
        eval_dataset=None if eval_data is None else _data_set(eval_data),
        rubric=_rubric(columns),
        max_turns=max_turns,
        **options,
    )


def _environment_class(make: Callable[..., Environment], seconds: float) -> Any:
    """A ``verifiers.MultiTurnEnv`` whose rollouts are episodes of ``make(**row)``."""
    vf = package()
    normalized = importlib.import_module("verifiers.utils.message_utils").normalize_messages

    base: Any = vf.MultiTurnEnv

    class Ours(base):  # type: ignore[misc]
        async def setup_state(self, state: Any) -> Any:
            state["ask"], state["columns"] = Asker(seconds), {}
            with _as_verifiers_error("reset", seconds):
                state["environment"] = await state["ask"](lambda: make(**state["info"]))
                start = await state["ask"](state["environment"].reset)
                messages, tools = start if isinstance(start, tuple) else (start, ())
                state["prompt"] = normalized(list(messages))
                functions = [schema["function"] for schema in schemas_of(tools)]
                state["tool_defs"] = [vf.Tool(**{"description": "", **function}) for function in functions]
            return state

        async def add_trajectory_step(self, state: Any, trajectory_step: Any) -> None:
            # The environment steps here because env_response is not called after the last of max_turns.
            await super().add_trajectory_step(state, trajectory_step)
            written = trajectory_step["completion"][-1]
            message = as_ours(written) | {"finish": "length" if trajectory_step["is_truncated"] else "stop"}
            with _as_verifiers_error("step", seconds):
                step: Step = await state["ask"](state["environment"].step, message)
                trajectory_step["reward"] = float(step.reward)
                state["columns"].update(step.columns)
                state["environment_answer"] = normalized(with_call_ids(step.messages, written))
            if step.done:
                state["final_env_response"] = state["environment_answer"]

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return state["environment_answer"]

        @vf.cleanup  # type: ignore[untyped-decorator]
        async def close_environment(self, state: Any) -> None:
            if "ask" not in state:  # cancelled before setup_state
                return
            close, ask = getattr(state.get("environment"), "close", None), state["ask"]
            try:
                if callable(close) and ask.left > 0:  # without time left, a call of the environment still hangs
                    with suppress(Exception):  # the rollout is over and has its reward
                        await ask(close)
            finally:
                ask.close()

    return Ours


@contextmanager
def _as_verifiers_error(what: str, seconds: float) -> Iterator[None]:
    """An error that is raised inside becomes a ``vf.Error``, with which verifiers ends only the rollout."""
    try:
        yield
    except Exception as error:
        reason = f"longer than {seconds} s" if isinstance(error, TimeoutError) and not str(error) else error
        raise package().Error(f"{what}: {type(error).__name__}: {reason}") from error


def _rubric(columns: Sequence[str]) -> Any:
    """The sum of the rewards, and a metric for each column."""

    def reward(state: Any) -> float:
        return math.fsum(step["reward"] or 0.0 for step in state["trajectory"])

    def metric(name: str) -> Callable[[Any], float]:
        def of_state(state: Any) -> float:
            return float(state["columns"].get(name, 0.0))

        of_state.__name__ = name
        return of_state

    rubric = package().Rubric(funcs=[reward])
    for name in columns:
        rubric.add_metric(metric(name))
    return rubric


def _data_set(data: Sequence[Mapping[str, Any]]) -> Any:
    """The data set of verifiers. Until ``reset`` the prompt is the row as text, because fields may differ in type."""
    texts = [json.dumps(dict(row), ensure_ascii=False) for row in data]
    made = [{"prompt": [{"role": "user", "content": text}], "info": text} for text in texts]
    return importlib.import_module("datasets").Dataset.from_list(made)
