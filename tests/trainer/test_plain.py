"""Without the extra ``train`` the command line does what needs none of it, and says what the rest needs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = ("algorithms", "algorithms dapo", "algorithms grpo dr_grpo", "doctor", "rollouts RUN --html RUN/page.html")
NEED_MORE = ("train x.yaml", "eval x.yaml", "plot RUN", "rollouts RUN")
BARE = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
for name in ("transformers", "tokenizers", "safetensors", "matplotlib", "rich", "yaml"):
    sys.modules[name] = None
from rlprims.cli import main
told = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    told.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Each command's exit code, output and errors in a process that cannot import a package of the extra."""
    run = tmp_path_factory.mktemp("run")
    row = {"step": 1, "group": 0, "prompt": "2+2", "response": "4", "score": 1.0, "status": "trained"}
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000001.jsonl").write_text(json.dumps(row) + "\n")
    commands = [text.replace("RUN", str(run)).split() for text in (*WORK, *NEED_MORE)]
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(commands)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "2+2" in (run / "page.html").read_text()
    return dict(zip((*WORK, *NEED_MORE), map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.slow
def test_commands_without_the_extra_work(told: dict[str, tuple[int, str, str]]) -> None:
    assert [told[command][0] for command in WORK] == [0] * len(WORK)
    shown = {command: told[command][1] for command in WORK}
    assert re.search(r"^dapo +DAPO", shown["algorithms"], re.MULTILINE)
    assert "losses.clipped_surrogate(clip_high=0.28, clip_low=0.2)" in shown["algorithms dapo"]
    assert re.search(r"^advantage.normalize_std +True +False$", shown["algorithms grpo dr_grpo"], re.MULTILINE)
    assert re.search(r"^no +rich .* +pip install '\.\[train\]'", shown["doctor"], re.MULTILINE)
    assert "page.html" in shown["rollouts RUN --html RUN/page.html"]


@pytest.mark.parametrize("command", NEED_MORE)
def test_a_command_without_its_package_prints_one_line(told: dict[str, tuple[int, str, str]], command: str) -> None:
    code, out, err = told[command]
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: this command needs \w+, which is not installed: .*pip install '\.\[train\]'.*\n", err)


def test_hints_name_what_exists() -> None:
    """Extras of pyproject.toml, installed from the clone: no index has a release."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *(ROOT / "rlprims").rglob("*.py")]
    for path in files:
        text = path.read_text()
        assert not re.search(r"pip install ['\"]?rlprims", text), path
        named = re.findall(r"hint\([\"'](\w+)[\"']\)", text) + re.findall(r"pip install ['\"]?\.\[(\w+)\]", text)
        assert set(named) <= set(extras), path
