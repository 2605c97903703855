"""``rlprims audit`` as a user types it, on files of every kind, and the page that it writes."""

import base64
import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlprims import DataProto, audit
from rlprims.cli import main
from rlprims.reports import step_page
from tests import tiny
from tests.audit.test_identify import centred, clipped, rollouts
from tests.reports.test_rollout_page import Reader

FORMULAS = ["advantages: advantage.grpo(eps=0.0001)", "loss: losses.clipped_surrogate(clip_high=0.28)",
            "mean: losses.token_mean"]  # fmt: skip
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[2J"
Run = pytest.CaptureFixture[str]


def right_step() -> dict[str, Any]:
    """GRPO by TRL's line, the clip of DAPO, one mean over the tokens."""
    batch: dict[str, Any] = rollouts()
    batch |= {name: batch[name].clamp(max=-0.01) for name in ("log_probs", "ref_log_probs")}
    batch["attention_mask"] = batch["response_mask"].clone()
    batch["advantages"] = centred(batch)
    batch["losses"] = clipped(batch)
    batch["loss"] = batch["losses"].sum() / batch["response_mask"].sum()
    return batch


def with_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A row whose mask has the padding token after its end."""
    mask = batch["response_mask"].clone()
    row = int((mask.sum(1) < mask.shape[1]).nonzero()[0])
    mask[row, int(mask[row].sum())] = True
    return {**batch, "response_mask": mask}


def tensor_file(path: Path, batch: dict[str, Any]) -> Path:
    save_file({name: torch.as_tensor(x).contiguous() for name, x in batch.items()}, str(path))
    return path


def rows_file(path: Path, batch: dict[str, Any]) -> Path:
    """One response per line, without padding."""
    lines = []
    for row, length in enumerate(batch["response_mask"].sum(1).tolist()):
        line: dict[str, Any] = {"loss": float(batch["loss"])}
        for name, x in batch.items():
            if isinstance(x, torch.Tensor) and x.dim() and name != "response_mask":
                line[name] = x[row, :length].tolist() if x.dim() == 2 else x[row].item()
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def saved(path: Path, batch: dict[str, Any]) -> Path:
    columns = {name: x for name, x in batch.items() if name != "loss"}
    DataProto.from_dict(columns, {"prompt": [HOSTILE] * 16}, {"loss": float(batch["loss"])}).save(path)
    return path


def said(capsys: Run) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("  ", "not told"))]


@pytest.mark.parametrize("write", [tensor_file, rows_file, saved])
def test_a_right_step_is_named_from_each_kind_of_file(write: Any, tmp_path: Path, capsys: Run) -> None:
    assert main(["audit", str(write(tmp_path / "step", right_step()))]) == 0
    assert said(capsys)[:3] == FORMULAS


def test_an_error_is_told_with_its_fix_and_the_exit_code_is_one(tmp_path: Path, capsys: Run) -> None:
    batch = with_padding(right_step())
    wanted = audit.report(batch)
    assert [x.code for x in wanted.errors][:1] == ["M4"]
    assert main(["audit", str(tensor_file(tmp_path / "step", batch)), "--json", str(tmp_path / "told.json")]) == 1
    out = capsys.readouterr().out
    assert "M4 error: 1 padding tokens are in response_mask" in out
    assert "\n  response_mask = response_mask & attention_mask.bool()\n" in out
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["stages"]["loss"]["said"] == FORMULAS[1].removeprefix("loss: ")
    assert "min" in told["stages"]["loss"]["sources"]["rlprims.losses.clipped_surrogate"]
    (found,) = [x for x in told["findings"] if x["code"] == "M4"]
    ((row, token),) = found["tokens"]
    assert batch["response_mask"][row, token]
    assert not batch["attention_mask"][row, token]
    assert found["explanation"].startswith("Padding is in the mask")


def test_notes_alone_are_no_failure() -> None:
    note = audit.Finding("G1", "note", "what", "how much", "how")
    needs = dict.fromkeys(("L1", "L2"), "needs rollout_log_probs")
    told = audit.Report(audit.Identified({}, 0), audit.Checked((note,), needs))
    assert told.errors == ()
    assert str(told).splitlines() == [
        "G1 note: what",
        "  how much",
        "  how",
        "not told: L1, L2: needs rollout_log_probs",
    ]


def test_a_dump_of_verl_has_no_numbers_of_formulas_and_says_so(tmp_path: Path, capsys: Run) -> None:
    row = {"input": "2+2", "output": "it is 4", "gts": "4", "score": 1.0, "step": 3}
    path = tmp_path / "3.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"output": "5", "score": 0.0}))
    assert main(["audit", str(path)]) == 0
    assert "not told: formulas: expected advantages with scores or rewards" in capsys.readouterr().out


def test_a_log_of_trl_has_its_advantages_named(tmp_path: Path, capsys: Run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    scores = torch.tensor([[1.0, 0.0, 0.25, 0.0], [0.0, 1.0, 1.0, 1.0]])
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
    log = {
        "step": ["1"] * 8,
        "prompt": ["a"] * 4 + ["b"] * 4,
        "completion": ["one", "two words", "three", "4", "5", "6 7", "8", "9"],
        "score": scores.flatten().tolist(),
        "advantage": advantages.flatten().tolist(),
    }
    parquet.write_table(pyarrow.table(log), tmp_path / "completions_00001.parquet")
    assert main(["audit", str(tmp_path / "completions_00001.parquet")]) == 0
    assert said(capsys)[0] == FORMULAS[0]


def broken(path: Path, kind: str) -> Path:
    whole = tensor_file(path, right_step()).read_bytes()
    lines = '{"log_probs": [1.0, 2.0], "loss": %s}\n'
    rows = rows_file(path, right_step()).read_text()
    content: dict[str, bytes] = {
        "cut": whole[: len(whole) // 2],
        "pickle": pickle.dumps({"a": 1}),
        "text": b"hello, this is no step",
        "empty": b"",
        "json": b'{"response": \n',
        "ragged": b'{"log_probs": [1.0, 2.0], "advantages": [1.0]}\n',
        "two losses": (lines % 1 + lines % 2).encode(),
        "no mask": tensor_file(path, {"scores": torch.ones(3)}).read_bytes(),
        "shape": tensor_file(path, right_step() | {"losses": torch.ones(2, 2)}).read_bytes(),
        "damaged batch": saved(path.with_name("batch"), right_step()).read_bytes()[:-9] + b"\0" * 9,
    }
    assert rows
    path.write_bytes(content[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "is damaged"),
        ("pickle", "is a pickle, which runs code when it is read"),
        ("text", "step:1: "),
        ("empty", "has no responses"),
        ("json", "step:1"),
        ("ragged", "expected as many per-token entries as the response has"),
        ("two losses", "loss differs between rows, expected one number of the step"),
        ("no mask", "expected response_mask (B, T), got None"),
        ("shape", "losses has shape (2, 2), expected (16, 5)"),
        ("damaged batch", "the file has changed since it was written"),
    ],
)
def test_a_broken_file_is_one_line(kind: str, message: str, tmp_path: Path, capsys: Run) -> None:
    assert main(["audit", str(broken(tmp_path / "step", kind))]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected PATH, a step's file or a run's directory, or --explain CODE"),
        (["no/such/file"], "no/such/file: No such file"),
        ([".", "--step", "3"], "has no recorded rollouts"),
        (["--explain", "Z9"], "no check 'Z9': "),
        (["STEP", "--step", "3"], "is no run: a file has one step"),
        (["STEP", "--tokenizer", "no/such/folder"], "cannot load 'no/such/folder'"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], message: str, tmp_path: Path, capsys: Run) -> None:
    step = str(tensor_file(tmp_path / "step", right_step()))
    assert main(["audit", *(step if word == "STEP" else word for word in arguments)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_code_is_explained_without_a_file(capsys: Run) -> None:
    assert main(["audit", "--explain", "m4"]) == 0
    assert capsys.readouterr().out.startswith("Padding is in the mask")


def test_the_page_has_formulas_findings_and_tokens_and_needs_nothing_else(tmp_path: Path, capsys: Run) -> None:
    batch = with_padding(right_step())
    path = saved(tmp_path / "step", batch)
    assert main(["audit", str(path), "--html", str(tmp_path / "deep" / "page.html")]) == 1
    page = (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    reader = Reader(page)
    assert page.count("</script") == 2
    assert not set(page) & set("\u202e\x1b")
    assert not [attrs for _, attrs in reader.tags if {"src", "href"} & attrs.keys()]
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert not re.search(r"https?:|\bfetch\(|innerHTML|eval\(", page)
    data = json.loads(reader.scripts[0])
    assert data["audit"]["stages"]["loss"]["said"] == FORMULAS[1].removeprefix("loss: ")
    (finding,) = [x for x in data["audit"]["findings"] if x["code"] == "M4"]
    ((row, token),) = finding["tokens"]
    groups = data["steps"][0]["groups"]
    assert groups[0]["prompt"].startswith("</script><script>alert(1)")
    shown = {one["id"]: one for group in groups for one in group["rows"]}
    assert sorted(shown) == list(range(16))
    assert next(iter(shown)) == row  # rows with findings come first
    assert "M4" in shown[row]["marks"][str(token)]
    assert shown[row]["outside"][: token + 1] == [False] * (token + 1)


def test_the_page_shows_text_with_a_tokenizer_and_the_mask_inside_a_row(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    ids = torch.tensor([tokenizer.encode("12+3=")])[:, :5]
    mask = torch.tensor([[False, True, False, True, False]])
    batch = {"response_mask": mask, "responses": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}
    report = audit.report(batch, tokenizer=tokenizer)
    assert report.identified.stages == {}
    assert "formulas" in report.checked.silent
    page = step_page.write_step_page(batch, report, tmp_path / "page.html", tokenizer=tokenizer)
    (row,) = json.loads(Reader(page.read_text()).scripts[0])["steps"][0]["groups"][0]["rows"]
    assert "".join(row["tokens"]) == tokenizer.decode(ids[0, :4])
    assert row["outside"] == [True, False, True, False]


def test_a_page_stays_small_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_page, "_MOST_BYTES", 1500)
    batch = right_step()
    page = step_page.write_step_page(batch, audit.report(batch), tmp_path / "page.html")
    data = json.loads(Reader(page.read_text()).scripts[0])
    count = sum(len(group["rows"]) for group in data["steps"][0]["groups"])
    assert 0 < count < 16
    assert data["notes"] == [f"To stay small, this page has {count} of 16 rows."]
