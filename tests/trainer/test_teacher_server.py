"""A teacher on a server: its numbers are those of the same model in the process, and other answers end the run."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlprims.execution import ExecutionError
from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from tests import tiny
from tests.trainer.vllm_server import serving

OPD = {"algorithm": {"preset": "opd", "group_size": 2}, "prompts_per_generation": None}
TOPK = {"preset": "opd", "group_size": 2, "loss_terms": [{"coefficient": 1.0, "loss": "losses.topk_kl"}]}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("teacher"), seed=1)


class Vllm(BaseHTTPRequestHandler):
    """The two answers of vLLM 0.32 that are read, with a model's own numbers; ``change`` spoils them."""

    model: Any
    tokenizer: Any
    change: Callable[[dict[str, Any]], dict[str, Any]]
    failures: list[int]
    """Statuses of the first answers."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = request["prompt"]
        if self.path == "/tokenize":
            answer = {"tokens": self.tokenizer(ids, add_special_tokens=request["add_special_tokens"])["input_ids"]}
        else:
            assert (self.path, request["max_tokens"]) == ("/v1/completions", 1)
            with torch.no_grad():
                log_probs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            orders = log_probs.argsort(descending=True).tolist()
            answer = {"choices": [{"prompt_logprobs": [None]}]}
            for values, order, token in zip(log_probs.tolist(), orders, ids[1:], strict=False):
                shown = dict.fromkeys([token, *order[: request["prompt_logprobs"]]])  # the token itself comes first
                at = {str(each): {"logprob": values[each], "rank": order.index(each) + 1} for each in shown}
                answer["choices"][0]["prompt_logprobs"].append(at)
        body = json.dumps(type(self).change(answer)).encode()
        self.send_response(self.failures.pop(0) if self.failures else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(teacher: Path) -> Iterator[Callable[..., str]]:
    servers = []

    def start(change: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer, *failures: int) -> str:
        parts: dict[str, Any] = {"model": AutoModelForCausalLM.from_pretrained(teacher), "failures": [*failures]}
        parts["change"] = staticmethod(change)
        parts["tokenizer"] = AutoTokenizer.from_pretrained(teacher)
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Vllm,), parts)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def steps_of(config: Config, console: Console) -> list[StepResult]:
    parts, steps = build(config, console), list[StepResult]()
    train(Trainer(config, parts.execution, parts.tokenizer, parts.training.rows), [lambda _, step: steps.append(step)])
    return steps


def taught_by(settings: dict[str, Any], teacher: Any) -> dict[str, Any]:
    return {**settings, **OPD, "model": {**settings["model"], "teacher": str(teacher)}}


def check_same(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path, url: str, *changes: str
) -> None:
    """The sampled tokens, and the teacher's five likeliest."""
    like = {**taught_by(settings, teacher), "algorithm": {**TOPK, "support": {"size": 5}}}
    other = like | {"model": taught_by(settings, url)["model"]}
    local, remote = steps_of(load(like, "steps=2"), console), steps_of(load(other, "steps=2", *changes), console)
    for one, other in zip(local, remote, strict=True):
        found, expected = (step.batch["teacher_log_probs"] for step in (other, one))
        mask = one.batch["response_mask"]
        assert torch.equal(other.batch["responses"], one.batch["responses"])
        torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-4)
        assert other.metrics["teacher_kl"] == pytest.approx(one.metrics["teacher_kl"], abs=1e-5)
        assert not found[~mask].any()
        assert torch.equal(other.batch["topk_ids"][mask], one.batch["topk_ids"][mask])
        top, of_five = (step.batch["teacher_topk_log_probs"] for step in (other, one))
        torch.testing.assert_close(top[mask], of_five[mask], rtol=0, atol=1e-4)
        assert not top[~mask].any()
    assert abs(local[0].metrics["teacher_kl"]) > 1e-3


def test_a_run_is_that_of_the_teacher_in_the_process(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path, served: Callable[..., str]
) -> None:
    check_same(load, settings, console, teacher, served())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda answer: {"tokens": [0]} if "tokens" in answer else answer, "another vocabulary"),
        (lambda answer: answer if "tokens" in answer else {"choices": [{}]}, "expected prompt_logprobs"),
        (
            lambda answer: answer if "tokens" in answer else {"choices": [{"prompt_logprobs": [None, {}]}]},
            "expected prompt_logprobs",
        ),
    ],
)
def test_another_answer_ends_the_run(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, served: Callable[..., str],
    change: Callable[[dict[str, Any]], dict[str, Any]], match: str,
) -> None:  # fmt: skip
    with pytest.raises(ExecutionError, match=rf"model\.teacher: http://\S+/v1: {match}"):
        steps_of(load(taught_by(settings, served(change)), "steps=1"), console)


def test_a_server_that_is_busy_is_asked_again_and_a_refusal_is_not(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, served: Callable[..., str]
) -> None:
    (step,) = steps_of(load(taught_by(settings, served(lambda answer: answer, 503)), "steps=1"), console)
    assert step.batch["teacher_log_probs"].isfinite().all()
    with pytest.raises(ExecutionError, match=r"model\.teacher: http://\S+/tokenize: HTTP 404 .*tokens"):
        steps_of(load(taught_by(settings, served(lambda answer: answer, 404)), "steps=1"), console)


def test_a_missing_client_is_named(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ImportError, match=r"a teacher on a server needs httpx2 .*pip install httpx2"):
        steps_of(load(taught_by(settings, "http://127.0.0.1:9/v1"), "steps=1"), console)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.support={size: 5, of: student}",
        "sampling.temperature=0.7",
        "sampling.top_k=5",
        "model.teacher_follows={rate: 0.1, every: 1}",
        "algorithm={preset: sdpo, group_size: 2}",
    ],
)
def test_what_a_server_cannot_do_is_refused(
    load: Callable[..., Config], settings: dict[str, Any], override: str
) -> None:
    with pytest.raises(ValueError, match=r"model\.teacher on a server needs temperature: 1"):
        load(taught_by(settings, "http://127.0.0.1:1/v1") | {"algorithm": TOPK}, override)


@pytest.mark.ray
def test_on_ranks(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path, served: Callable[..., str]
) -> None:
    check_same(load, settings, console, teacher, served(), "execution=ray", "ray.engine=hf")


@pytest.mark.ray
def test_vllm_s_own_server(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    with serving(teacher, tmp_path / "server.log") as url:
        check_same(load, settings, console, teacher, f"{url}/v1")
