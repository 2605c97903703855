"""The environment of examples/agent, and its teacher, whose episodes it answers as they are written."""

import importlib.util
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

AGENT = Path(__file__).parents[2] / "examples" / "agent"


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    loaded = []
    for name in ("stories", "calculator"):
        spec = importlib.util.spec_from_file_location(name, AGENT / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        loaded.append(module)
    return loaded[0], loaded[1]


def test_the_calculator_answers_formulas_and_nothing_else(agent: tuple[ModuleType, ModuleType]) -> None:
    calculate = agent[1].calculate
    assert [calculate(text) for text in ("19+4", "19-20", "19*3")] == ["23", "-1", "57"]
    for text in ("", "19", "19+", "+4", "1+2+3", "a*b", "9**9", "__import__('os')", "9" * 8 + "*9", "٣+4"):
        assert calculate(text) in ("?", "7"), text  # a digit of another script is a digit


def test_the_teachers_results_are_the_calculators(agent: tuple[ModuleType, ModuleType]) -> None:
    from rlprims.environments import parse_calls

    stories, calculator = agent
    rng, right, calls = Random(0), 0, 0
    for _ in range(300):
        story = stories.new_story(rng)
        environment = calculator.Stories(story.question, story.answer)
        messages, tools = environment.reset()
        assert messages[0]["content"] == story.question
        *called, last = stories.teacher(story, rng)
        for written, result in called:
            found = parse_calls(written, "tags", tools=tools)
            assert len(found.calls) + len(found.malformed) == 1
            functions = [{"function": call._asdict()} for call in found.calls]
            step = environment.step(
                {"content": found.content, "tool_calls": functions, "malformed_calls": found.malformed}
            )
            assert [message["content"] for message in step.messages] == [result]
            assert (step.reward, step.done) == (-0.05, False)
            calls += len(found.calls)
        step = environment.step({"role": "assistant", "content": last[0]})
        assert step.done
        right += int(step.reward)
    assert 0.15 < right / 300 < 0.45, "the teacher is often wrong"
    assert calls / 300 == pytest.approx(0.35 * 2.6, abs=0.15)
