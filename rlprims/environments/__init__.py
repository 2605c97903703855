"""Environments: a protocol with two methods, the driver of episodes, and tools from functions.

An :class:`Environment` takes and returns messages. :func:`rollout` runs one episode of it with a sampler and returns
the exact turns, which :mod:`rlprims.turns` merges into rows. :func:`tool` makes a tool from a function,
:func:`parse_calls` parses a model's calls, :func:`answer_calls` runs them. In the trainer: ``data.environment``.
"""

from rlprims.environments._calls import CallStyle, ParsedCalls, ToolCall, parse_calls
from rlprims.environments._protocol import Completion, Environment, FirstMessages, Message, Renderer, Sampler, Step
from rlprims.environments._renderers import ChatRenderer, TextRenderer
from rlprims.environments._rollout import Episode, EpisodeLimits, rollout
from rlprims.environments._tools import Tool, answer_calls, tool

__all__ = [
    "CallStyle", "ChatRenderer", "Completion", "Environment", "Episode", "EpisodeLimits", "FirstMessages", "Message",
    "ParsedCalls", "Renderer", "Sampler", "Step", "TextRenderer", "Tool", "ToolCall", "answer_calls", "parse_calls",
    "rollout", "tool",
]  # fmt: skip
