"""A real, if untrained, language model as the judge: vLLM's server on a CPU, whose grammar makes it answer JSON."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.judge import Judge, pair, rubric, tournament
from rlprims.rewards.several import Reward, several
from tests import tiny

pytestmark = pytest.mark.ray
CRITERIA = {"right": {"text": "the number is the reference's", "weight": 3}, "short": "one sentence"}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save_bytes_model(directory: Path) -> Path:
    """Its tokens are bytes, so that it can write any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = TEMPLATE
    changes = {"vocab_size": len(fast), "max_position_embeddings": 4096, "eos_token_id": 0, "pad_token_id": 0}
    tiny.causal_lm(**changes).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    model = save_bytes_model(folder / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "bytes", "--dtype", "float32"]
    command += ["--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "8"]
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=os.environ | quiet, stdout=file, stderr=file, start_new_session=True)
    try:
        limit = time.monotonic() + 150
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < limit, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_a_real_model_grades_compares_and_ranks(url: str, tmp_path: Path) -> None:
    judge = Judge(url, "bytes", reason=False, max_tokens=64, retries=1, cache=str(tmp_path / "verdicts.sqlite"))
    rewards = [
        Reward(rubric, options={"judge": judge, "criteria": CRITERIA}, concurrency=4),
        Reward(pair, 0.5, options={"judge": judge}, concurrency=4),
        Reward(tournament, 0.25, per="group", options={"judge": judge}, concurrency=1),
    ]
    responses = ["it is 72", "seventy", "I do not know", "6*12=72"]
    columns = {"question": ["6*12?"] * 4}
    said = several(rewards, responses, ["72"] * 4, columns, group_ids=[0, 0, 1, 1])
    assert said.failures == [[]] * 4
    levels = {n / 5 for n in range(6)}
    for name in ("right", "short"):
        assert {round(x, 6) for x in said.columns[f"rubric/{name}"].tolist()} <= levels
    grades = (3 * said.columns["rubric/right"] + said.columns["rubric/short"]) / 4
    assert said.columns["rubric"].tolist() == pytest.approx(grades.tolist())
    assert set(said.columns["pair"].tolist()) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    wins = said.columns["tournament"]
    assert wins[:2].sum() == wins[2:].sum() == 1
    assert (said.columns["rubric/judge_tokens"] > 100).all()
    again = several(rewards, responses, ["72"] * 4, columns, group_ids=[0, 0, 1, 1])
    assert again.scores.tolist() == said.scores.tolist()
    assert (again.columns["rubric/judge_tokens"] == 0).all(), "from the cache"


def test_a_verdict_that_does_not_fit_in_max_tokens(url: str) -> None:
    judge = Judge(url, "bytes", max_tokens=8, retries=0, attempts=1)
    reward = Reward(rubric, options={"judge": judge, "criteria": CRITERIA}, concurrency=2)
    (failures,) = several([reward], ["it is 72"], ["72"]).failures
    assert [failure.cause for failure in failures] == ["rubric no verdict"]
