"""``examples/sandbox_fusion.py``, named by a run's settings, at a server that runs what it is sent."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.sandbox_fusion import RemoteError, run_cases
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import naive
from rlprims.rewards.verifiers import code_stdin
from rlprims.runs.config import load_as
from rlprims.trainer.config import Config
from tests.rewards.server import Reply, Server

SCRIPT = Path(__file__).parents[2] / "examples" / "sandbox_fusion.py"
LIMITS: Any = {"function": None, "seconds": 5.0, "total_seconds": 60.0, "memory_mb": 512}


@pytest.fixture
def of_file(server: Server) -> dict[str, Any]:
    """The option of the verifier, as settings have it."""
    return {"fn": f"{SCRIPT}:run_cases", "url": server.url}


def fusion(request: Any) -> Reply:
    """As SandboxFusion's run_code answers."""
    assert set(request) == {
        "code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB", "files", "fetch_files"
    }  # fmt: skip
    assert request["language"] == "python"
    match request["code"].rpartition("\n")[2]:
        case "double":
            run = {"status": "Finished", "return_code": 0, "stdout": f"{2 * int(request['stdin'])}\n", "stderr": ""}
        case "hang":
            run = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        case "raise":
            run = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "Error"}
        case _:
            return 200, {"status": "SandboxError", "message": "no room"}, {}
    ok = run["return_code"] == 0
    return 200, {"status": "Success" if ok else "Failed", "message": "", "compile_result": None, "run_result": run}, {}


def test_programs_at_a_server(server: Server) -> None:
    server.reply = fusion
    assert list(run_cases("double", ["4", "5"], url=server.url, **LIMITS)) == [
        ("finished", 0, "8\n"),
        ("finished", 0, "10\n"),
    ]
    assert {"compile_timeout": 5.0, "run_timeout": 5.0, "memory_limit_MB": 512}.items() <= server.requests[0].items()
    (hung,), (failed,) = (list(run_cases(program, [""], url=server.url, **LIMITS)) for program in ("hang", "raise"))
    assert (hung.status, failed.status, failed.ok) == ("timeout", "finished", False)
    with pytest.raises(RemoteError, match="the sandbox has failed: no room"):
        list(run_cases("else", [""], url=server.url, **LIMITS))


def test_no_case_starts_after_the_time_of_all(server: Server) -> None:
    server.reply = fusion
    assert list(run_cases("double", ["4"] * 3, url=server.url, **{**LIMITS, "total_seconds": -1.0})) == []
    assert not server.requests


@pytest.mark.parametrize(
    ("replies", "cause", "asked"),
    [
        ([(503, {}, {}), (429, {}, {})], None, 3),
        ([(404, {"why": "no such page"}, {})], "HTTP 404", 1),
        ([(500, {}, {})] * 3, "HTTP 500", 3),
        ([(302, {}, {"Location": "http://elsewhere/"})], "HTTP 302", 1),
        ([(200, b"<html>", {})], "wrong answer", 1),
    ],
)
def test_a_request_is_sent_again_if_that_may_help(
    server: Server, monkeypatch: pytest.MonkeyPatch, replies: list[Reply], cause: str | None, asked: int
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("examples.sandbox_fusion.time.sleep", waits.append)
    left = iter(replies)
    server.reply = lambda request: next(left, None) or fusion(request)
    outcome = run_cases("double", ["4"], url=server.url, retries=2, **LIMITS)
    if cause is None:
        assert [result.output for result in outcome] == ["8\n"]
    else:
        with pytest.raises(RemoteError, match=f"{server.url}: .*, after {asked} attempts") as failed:
            list(outcome)
        assert failed.value.cause == cause
    assert len(server.requests) == asked
    assert waits == [1.0, 2.0][: asked - 1]


def test_no_server_is_a_failure_with_its_cause(of_file: dict[str, Any]) -> None:
    run = {**of_file, "url": "http://127.0.0.1:9/run_code", "retries": 0}
    scored = naive(code_stdin, ["print(1)"], [{"inputs": [""], "outputs": ["1"]}], run=run)
    assert list(scored.causes) == ["no answer"]
    assert scored.scores.isnan().all()


def running(request: Any) -> Reply:
    """As SandboxFusion does: the program in a process of its own."""
    command = [sys.executable, "-c", request["code"]]
    ran = subprocess.run(command, input=request["stdin"], capture_output=True, text=True, timeout=20, check=False)
    run = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
    return 200, {"status": "Failed" if ran.returncode else "Success", "message": "", "run_result": run}, {}


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def double(x):\n    print('0' * 99)\n    return 2 * x", 1.0),
        ("class Solution:\n    def double(self, x):\n        return 2 * x", 1.0),
        ("def double(x):\n    return math.prod([2, x])", 1.0),  # the prompt's import
        ("def double(x):\n    return 4", 0.5),
        ("def double(x):\n    raise SystemExit(0)", 0.0),
        ("import os\nprint(4)\nos._exit(0)", 0.0),
        ("def double(x):\n    return {4}", 0.0),
        ("def twice(x):\n    return 2 * x", 0.0),
        ("def double(x:", 0.0),
    ],
)
def test_functions_called_at_a_server(server: Server, of_file: dict[str, Any], program: str, passed: float) -> None:
    server.reply = running
    answer = {"fn_name": "double", "inputs": [[2], [3]], "outputs": [4, 6], "prompt": "import math\n"}
    assert code_stdin(program, answer, run=of_file, partial=True)["passed"] == passed


def test_values_are_compared_as_json(server: Server, of_file: dict[str, Any]) -> None:
    server.reply = running
    answer = {"fn_name": "f", "inputs": [[[1, 2], {"a": None}]], "outputs": [{"1": [0.5, True], "2": "é"}]}
    program = "def f(x, y):\n    return {x[0]: (0.5, y == {'a': None}), 2: 'é'}"
    assert code_stdin(program, answer, run=of_file)["score"] == 1
    assert code_stdin(program.replace("True", "1").replace("y ==", "y !="), answer, run=of_file)["score"] == 0


def test_code_verified_at_a_server(server: Server, of_file: dict[str, Any]) -> None:
    server.reply = fusion
    answer = {"inputs": ["1", "2", "4"], "outputs": ["2", "4", "9"]}
    assert code_stdin("double", answer, run=of_file, partial=True)["passed"] == pytest.approx(2 / 3)
    assert code_stdin("hang", answer, run=of_file)["score"] == 0


def test_a_run_names_it_beside_its_settings(server: Server, tmp_path: Path) -> None:
    """As the file says: the option goes through the settings, and by its path into the processes of a pool."""
    server.reply = fusion
    (tmp_path / "mine.py").write_text(SCRIPT.read_text())
    settings = {"run_dir": str(tmp_path / "run"), "model": {"path": "m"}, "algorithm": "grpo", "data": {"train": "x"}}
    run = {"fn": "mine.py:run_cases", "url": server.url}
    settings["verifier"] = {"fn": "rlprims.rewards.verifiers.code_stdin", "run": run, "partial": True}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    config = load_as(Config, tmp_path / "run.yaml")
    verifier = config.verifier
    assert dict(verifier.bound)["run"] == {"fn": f"{tmp_path}/mine.py:run_cases", "url": server.url}
    assert Config.model_validate(json.loads(config.model_dump_json())).verifier.bound == verifier.bound
    with Pool(verifier.fn, dict(verifier.bound), workers=1) as pool:
        scored = pool(["double", "raise"], [{"inputs": ["1", "2"], "outputs": ["2", "5"]}] * 2)
    assert scored.scores.tolist() == [0.5, 0.0]
    assert len(server.requests) == 4
