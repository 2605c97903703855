"""A list of reward functions in a run's config: weights, columns, metrics, failures of each, and the data they see."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.runs.directory import RunDirectory
from rlprims.trainer.config import Config
from rlprims.trainer.session import build, resume, start
from tests import tiny
from tests.rewards.server import Server
from tests.rewards.test_remote import lengths
from tests.trainer.runs import metrics_of
from tests.trainer.test_loop import run

Load = Callable[..., Config]
Settings = dict[str, Any]
OWN = "tests.trainer.verifiers"
REMOTE = Path(__file__).parents[2] / "examples" / "remote_reward.py"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        server.reply = lengths
        yield server


@pytest.fixture
def listed(settings: Settings, server: Server, tmp_path: Path) -> Settings:
    """Sync, async, per group, per batch, in workers and at a server; answers and fields are lists and mappings."""
    rows = [row | {"level": n % 7, "parts": [n], "answer": {"gold": [n]}} for n, row in enumerate(tiny.sums(20))]
    data = {"train": str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))}
    served = {"url": server.url, "key": "SERVED_KEY", "retries": 0}
    rewards = [
        {"fn": f"{OWN}.has_a_digit", "name": "digit"},
        {"fn": f"{OWN}.brief", "weight": 0.5, "concurrency": 8, "seconds": 5.0},
        {"fn": f"{OWN}.rank", "weight": 0.25, "per": "group"},
        {"fn": f"{OWN}.of_parts", "weight": 0.125, "per": "batch"},
        {"fn": {"fn": f"{REMOTE}:remote", "server": served}, "per": "batch", "name": "served", "weight": 0.0625},
        {"fn": {"fn": f"{OWN}.fails_on_a", "also": "c"}, "name": "watched", "weight": 0, "skips": True, "workers": 1},
    ]
    values = {name: value for name, value in settings.items() if name != "verifier"}
    algorithm = {"preset": "rloo", "group_size": 3}
    return values | {"rewards": rewards, "steps": 2, "algorithm": algorithm, "data": data, "prompts_per_generation": 4}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED_KEY", "canary")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tests.trainer.verifiers")
def test_a_run_with_a_weighted_list(load: Load, listed: Settings, console: Console, server: Server) -> None:
    config = load(listed)
    assert config.verifier is None
    assert Config.model_validate(config.model_dump(mode="json")) == config
    _, steps = run(config, console)
    weights = {"digit": 1.0, "brief": 0.5, "rank": 0.25, "of_parts": 0.125, "served": 0.0625}
    for step in steps:
        rows = step.batch
        expected = sum(weight * rows[name] for name, weight in weights.items())
        torch.testing.assert_close(rows["scores"], expected)
        texts = rows["response"]
        assert rows["brief/length"].tolist() == [len(text) for text in texts]
        levels = [fields["level"] for fields in rows["fields"]]
        assert rows["brief"].tolist() == [len(t) < level for t, level in zip(texts, levels, strict=True)]
        assert rows["served"].tolist() == [len(text) for text in texts]
        for group in rows.split(3):
            assert sorted(group["rank"].tolist())[0] == 0
        for name in weights:
            assert f"score/{name}" in step.metrics
        every = [f for rows, _ in [(step.batch, ""), *step.dropped] for f in rows["failure"] if f]
        assert step.metrics.get("failures/watched raised RuntimeError", 0) == len(every)
        assert {f.partition(": ")[0] for f in every} <= {"watched raised RuntimeError"}
        assert not step.dropped, "one that is only watched costs nothing"
    assert server.headers[0]["Authorization"] == "Bearer canary"
    assert set(server.requests[0]) >= {"responses", "answers", "question", "level", "parts", "data_source"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_fails_costs_its_rows_and_is_counted(
    load: Load, listed: Settings, console: Console, server: Server
) -> None:
    def bad(text: str) -> bool:
        return any(character in "1234+" for character in text[:3])

    server.reply = lambda request: (
        (404, {}, {}) if any(bad(text) for text in request["responses"]) else lengths(request)
    )
    listed["rewards"][4]["fn"]["server"]["rows_per_request"] = 1
    _, steps = run(load(listed, "unscored=leave_out"), console)
    failed = 0
    for step in steps:
        rows = step.batch
        lost = torch.tensor([bad(text) for text in rows["response"]])
        assert torch.equal(rows["scores"].isnan(), lost)
        assert torch.equal(rows["served"].isnan(), lost)
        assert rows["digit"].isfinite().all()
        assert step.metrics.get("failures/served HTTP 404", 0) >= lost.sum()
        failed += int(lost.sum())
    assert failed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tests.trainer.verifiers")
def test_from_the_command_line_to_a_resume(
    load: Load, listed: Settings, console: Console, tmp_path: Path, server: Server
) -> None:
    listed["data"]["eval"] = listed["data"]["train"]
    config = load(listed | {"checkpoint": {"every": 1}, "evaluation": {"every": 2, "samples": 1, "limit": 3}})
    assert start(config, console) == 0
    lines = metrics_of(tmp_path / "run")
    assert {line["kind"] for line in lines} == {"train", "eval"}
    assert all("sampled/acc" in line for line in lines if line["kind"] == "eval"), "the first is asked"
    row = json.loads((tmp_path / "run/rollouts/step_000002.jsonl").read_text().splitlines()[0])
    assert {"digit", "brief", "brief/length", "served", "watched"} <= set(row)
    assert isinstance(row["answer"], dict)
    directory = RunDirectory.open(tmp_path / "run")
    assert resume(directory, directory.config(Config).model_copy(update={"steps": 3}), console) == 0
    assert [line["step"] for line in metrics_of(tmp_path / "run") if line["kind"] == "train"] == [1, 2, 3]


def test_beside_a_verifier_and_weights(load: Load, settings: Settings, console: Console) -> None:
    rewards = [{"fn": f"{OWN}.brief", "weight": 0.5}]
    _, (step,) = run(load(settings | {"rewards": rewards, "steps": 1}), console)
    torch.testing.assert_close(step.batch["scores"], step.batch["verifier_scores"] + 0.5 * step.batch["brief"])
    assert torch.equal(step.batch["acc"], step.batch["verifier_scores"])
    weights = {"verifier_scores": 2.0, "brief/length": 0.125}
    _, (step,) = run(load(settings | {"rewards": rewards, "steps": 1, "score_weights": weights}), console)
    expected = 2 * step.batch["verifier_scores"] + 0.125 * step.batch["brief/length"]
    torch.testing.assert_close(step.batch["scores"], expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": [{"weight": 1.0}]}, "rewards.0.fn: is missing: write fn"),
        ({"rewards": [{"url": "http://a/"}]}, r"write fn: {fn: examples/remote_reward.py:remote, server: {url: 'http"),
        ({"rewards": [{"fn": f"{OWN}.brief"}, {"fn": f"{OWN}.brief"}]}, "occur twice"),
        (
            {"rewards": [{"fn": f"{OWN}.brief", "name": "scores"}]},
            r"\['scores'\] occur twice or are names of the trainer",
        ),
        ({"rewards": [{"fn": f"{OWN}.brief", "weight": 0}]}, "every weight is 0"),
        ({"rewards": [{"fn": f"{OWN}.brief", "workers": 1}]}, "do not support async functions"),
        ({"rewards": [{"fn": f"{OWN}.rank", "seconds": 1}]}, "has seconds, expected an async function"),
        ({"rewards": [{"fn": f"{OWN}.rank", "wieght": 1}]}, "did you mean 'weight'"),
        ({"verifier": None}, "nothing scores the responses: write verifier: "),
    ],
)
def test_settings_that_do_not_fit(load: Load, listed: Settings, change: Settings, said: str) -> None:
    values = listed | change
    if "rewards" not in change:
        del values["rewards"]
    with pytest.raises(ValueError, match=said):
        load(values)


class TestWhenTheDataIsRead:
    def build(self, load: Load, settings: Settings, console: Console, tmp_path: Path, **row: Any) -> None:
        rows = [*tiny.sums(2), tiny.sums(1)[0] | row]
        data = {"train": str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))}
        build(load(settings | {"data": data}), console)

    def test_tests_that_cannot_be_run(self, load: Load, settings: Settings, console: Console, tmp_path: Path) -> None:
        settings["verifier"] = "rlprims.rewards.verifiers.code_asserts"
        good = {"answer": "assert add(1, 2) == 3"}
        with pytest.raises(ValueError, match=r"rows.jsonl:1: the answer cannot be scored: .*call no function"):
            self.build(load, settings, console, tmp_path)
        rows = [row | good for row in tiny.sums(2)]
        bad = rows[0] | {"answer": "assert add(1, 2"}
        data = {"train": str(tiny.write_jsonl(tmp_path / "rows.jsonl", [*rows, bad]))}
        with pytest.raises(ValueError, match=r"rows.jsonl:3: the answer cannot be scored: .*not Python"):
            build(load(settings | {"data": data}), console)

    def test_an_unknown_data_source(self, load: Load, settings: Settings, console: Console, tmp_path: Path) -> None:
        settings["verifier"] = {"fn": "rlprims.rewards.verifiers.by_source", "table": {"su*": settings["verifier"]}}
        self.build(load, settings, console, tmp_path, data_source="aime24")
        with pytest.raises(ValueError, match=r"rows.jsonl:3: .*no verifier .*; similar names are"):
            self.build(load, settings, console, tmp_path, data_source="olympiadbnch")

    def test_a_column_that_is_not_there(self, load: Load, settings: Settings, console: Console, tmp_path: Path) -> None:
        settings |= {"rewards": [{"fn": f"{OWN}.of_parts", "per": "batch"}]}
        with pytest.raises(ValueError, match=r"needs the columns \['parts'\]"):
            self.build(load, settings, console, tmp_path)
