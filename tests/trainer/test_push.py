"""``examples/push.py`` with the real client, at a server that answers as the hub's API does."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from examples.push import main
from tests.trainer.runs import rlprims

SCRIPT = Path(__file__).parents[2] / "examples" / "push.py"


class Hub(ThreadingHTTPServer):
    """One repository, and what was committed to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.is_private = True
        self.message = ""


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None: ...

    def answer(self, body: Any, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert self.path.startswith("/api/models/me/words")
        self.answer({"id": "me/words", "private": self.server.is_private, "sha": "0" * 40, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        hub, address = self.server, f"http://127.0.0.1:{self.server.server_port}"
        if self.headers["Authorization"] != "Bearer hf_test":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer({"url": f"{address}/me/words"}, 409 if len(hub.created) > 1 else 200)
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/me/words/preupload/main"):
            files = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
            )
        else:
            assert self.path.startswith("/api/models/me/words/commit/main"), self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    hub.message = line["value"]["summary"]
                else:
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{address}/me/words/commit/{'1' * 40}"})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(settings: dict[str, Any], tmp_path: Path) -> Path:
    settings["evaluation"] |= {"every": 2, "best": "sampled/acc"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings | {"verifier": f"{mine(tmp_path)}:reward"}))
    rlprims("train", tmp_path / "c.yaml", "steps=4")
    return Path(settings["run_dir"])


def mine(folder: Path) -> Path:
    (folder / "secret").mkdir()
    text = "from tests.trainer.verifiers import has_a_digit\n\n\ndef reward(response, answer):\n"
    (folder / "secret/mine.py").write_text(f"{text}    return has_a_digit(response, answer)\n")
    return folder / "secret/mine.py"


def push(hub: Hub, *arguments: str | Path, token: str = "hf_test") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    changes = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    return subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_dry_run_writes_the_folder_and_prints_the_card(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "me/words", "--dry-run", "--checkpoint", "2"]) == 0
    card = (run / "hub/README.md").read_text()
    assert card in capsys.readouterr().out
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlprims", "dapo"],
    }
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (evaluated,) = [line for line in last if line["kind"] == "eval" and line["step"] == 2]
    assert f"| eval | sampled/acc | {last[0]['sampled/acc']:.4g} | {evaluated['sampled/acc']:.4g} |" in text
    assert "clip_high: 0.28" in text
    assert "trained on sums.jsonl by dapo: step 2" in text
    assert "verifier: mine.py:reward" in text
    assert str(run.parent) not in card  # what is on this machine is not published
    assert (run / "hub/curves.png").exists()


@pytest.mark.slow
def test_the_real_client_commits_what_the_folder_has(run: Path, hub: Hub) -> None:
    pushed = push(hub, run, "me/words", "--private", "--checkpoint", "best")
    assert pushed.returncode == 0, pushed.stderr
    assert f"pushed: http://127.0.0.1:{hub.server_port}/me/words" in pushed.stdout
    assert hub.created[0]["name"] == "words"
    assert hub.created[0]["organization"] == "me"
    assert hub.created[0]["visibility" if "visibility" in hub.created[0] else "private"] in ("private", True)
    best = json.loads((run / "best.json").read_text())["step"]
    policy = run / f"checkpoints/step_{best:06d}/policy"
    kept = {path.name: path.read_bytes() for path in policy.iterdir()}
    assert {name: hub.files[name] for name in kept} == kept
    assert hub.files.keys() - kept.keys() == {"README.md", "curves.png"}
    assert hub.message == f"rlprims, step {best}"
    assert not (run / "hub").exists()
    assert push(hub, run, "me/words").returncode == 0  # it exists by now
    hub.is_private = False
    hub.files.clear()
    public = push(hub, run, "me/words", "--private")
    assert public.returncode == 2
    assert "it exists and is public, so nothing was pushed" in public.stderr
    assert not hub.files
    refused = push(hub, run, "me/words", token="hf_wrong")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("me/words/x",), "me/words/x: write YOUR_NAME/NAME"),
        (("me/words", "--checkpoint", "newest"), "--checkpoint newest: write last, best or a step"),
        (("me/words", "--checkpoint", "3"), "expected a step of step_000002, step_000004"),
        (("me/words", "--model", "critic"), "has no model 'critic'"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *arguments, "--dry-run"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
