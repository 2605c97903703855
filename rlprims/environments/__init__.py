"""Environments: a protocol with two methods, the driver of episodes, and tools from functions.

An :class:`Environment` takes and returns messages. :func:`rollout` runs one episode of it with a sampler and returns
the exact turns, which :mod:`rlprims.turns` merges into rows. :func:`tool` makes a tool from a function,
:func:`parse_calls` parses the calls in a model's text, :func:`answer_calls` runs them. In the trainer an environment is
the setting ``data.environment``.
"""

from rlprims.environments._calls import Call, Calls, CallStyle, parse_calls
from rlprims.environments._protocol import Completion, Environment, Message, Renderer, Sample, Start, Step
from rlprims.environments._renderers import ChatRenderer, TextRenderer
from rlprims.environments._rollout import Episode, Limits, rollout
from rlprims.environments._tools import Tool, answer_calls, tool

__all__ = [
    "Call",
    "CallStyle",
    "Calls",
    "ChatRenderer",
    "Completion",
    "Environment",
    "Episode",
    "Limits",
    "Message",
    "Renderer",
    "Sample",
    "Start",
    "Step",
    "TextRenderer",
    "Tool",
    "answer_calls",
    "parse_calls",
    "rollout",
    "tool",
]
