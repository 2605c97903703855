"""The pages: their code runs, their lists are whole, and their formulas are found."""

import base64
import doctest
import importlib
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from benchmarks import _report
from rlprims import rewards
from rlprims.algorithms import PRESETS, Algorithm, BoundFunction
from rlprims.fit.config import FitConfig
from rlprims.testing._cases import VOCABULARY
from rlprims.trainer.config import Config
from tools import paper_pages, version_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.is_relative_to(DOCS / "_build"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(path.read_text()) if kind == language]


ON_RAY = {DOCS / "controller.md"}
"""tests/execution/test_execution_groups.py runs it."""


@pytest.mark.parametrize(
    "path", [path for path in PAGES if ">>> " in path.read_text() and path not in ON_RAY], ids=name
)
def test_examples(path: Path) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=options)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("path", sorted(DOCS.glob("how_to/*.md")), ids=name)
def test_every_block_of_the_how_to_pages_is_an_example_that_runs(path: Path) -> None:
    found = [(kind, code) for kind, code in BLOCK.findall(path.read_text())]
    assert 2 * len(found) == path.read_text().count("```")
    assert all(kind == "python" and ">>> " in code for kind, code in found)
    assert found or path.stem == "README"


@pytest.mark.parametrize("path", [path for path in [*PAGES, ROOT / "README.md"] if blocks(path, "python")], ids=str)
def test_python_blocks_that_are_no_examples_compile(path: Path) -> None:
    """What needs a peer or a model is run in tests/peers; here it is read, and its imports from here are there."""
    for code in blocks(path, "python"):
        if ">>> " not in code:
            compile(code, str(path), "exec")
            for line in re.findall(r"^(?:from rlprims\S* import .*|import rlprims.*)$", code, re.MULTILINE):
                exec(line, {})


def test_the_page_on_rewards_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of it, one after the other; ``url`` is a judge that is really there."""
    pytest.importorskip("math_verify")
    from tests.rewards.server import Server
    from tests.rewards.test_judges import docile

    with Server() as server:
        server.reply = docile
        names = {"__name__": "page", "url": server.url.removesuffix("/score") + "/v1", "folder": tmp_path}
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        for code in blocks(DOCS / "rewards.md", "python"):
            exec(compile(code, "rewards.md", "exec"), names)
    assert names["weighted"].scores.tolist() == [1.0, 1.5]
    assert names["scored"].scores[0] == 1.0
    assert len(server.requests) == 1 + 2


def test_the_settings_of_the_page_on_rewards_are_settings() -> None:
    whole = {
        "run_dir": "run",
        "algorithm": "grpo",
        "verifier": "rewards.verifiers.gsm8k",
        "model": {"path": "m"},
        "data": {"train": "d"},
    }
    for text in blocks(DOCS / "rewards.md", "yaml"):
        config = Config.model_validate(whole | yaml.safe_load(text))
        assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("path", [path for path in [*PAGES, ROOT / "README.md"] if blocks(path, "yaml")], ids=str)
def test_settings_are_settings(path: Path) -> None:
    for text in blocks(path, "yaml"):
        values = yaml.safe_load(text)
        if "run_dir" in values:
            (Config if "algorithm" in values else FitConfig).model_validate(values)


def test_the_page_of_papers_has_every_preset_and_every_primitive_with_a_paper() -> None:
    page = paper_pages.page()
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert {*PRESETS, "advantage.gae", "losses.dpo", "corrections.fipo"} <= set(headings)
    assert len(headings) == len(set(headings)) > 150
    assert "[arXiv:2402.03300](https://arxiv.org/abs/2402.03300)" in page.split("### `grpo`")[1].split("###")[0]
    assert not re.search(r"(?<!\[)arXiv:\d{4}\.\d{5}", page)


def test_every_row_of_the_benchmarks_is_on_their_page() -> None:
    """``make bench`` writes the numbers and the report; the page of all rows is made with the site."""
    page = _report.every_row()
    stored = json.loads(_report.STORED.read_text())
    assert len(re.findall(r"^\| (?!case )", page, re.MULTILINE)) == len(stored["rows"])
    assert (DOCS / "benchmarks" / "README.md").read_text() == _report.summary(stored, _report.STORED.name)


def test_pages_that_the_site_makes_name_what_makes_them() -> None:
    made = {path: re.search(r"<!-- made: (\S+) -->", path.read_text()) for path in PAGES}
    found = {name(path): match[1] for path, match in made.items() if match}
    assert set(found) == {"papers.md", "benchmarks/rows.md"}
    for place, function in found.items():
        module, _, attribute = function.rpartition(".")
        title = (DOCS / place).read_text().splitlines()[0]
        assert getattr(importlib.import_module(module), attribute)().startswith(f"{title}\n")


def test_every_name_of_the_vocabulary_is_explained() -> None:
    table = (DOCS / "vocabulary.md").read_text().split("## Beside them")[0]
    first = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert sorted(word for cell in first for word in re.findall(r"`(\w+)`", cell)) == sorted(VOCABULARY)


def listed() -> set[str]:
    """What the navigation names, patterns resolved."""
    entries = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    names = {line for block in entries for line in block.splitlines() if line and not line.startswith(":")}
    return names | {name.removesuffix("/README") for name in names}


def test_the_navigation_has_every_page() -> None:
    everything = [*PAGES, *DOCS.glob("api/*.rst"), *DOCS.glob("notebooks/*.ipynb")]
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in everything} - {"index"}
    missing = {name for name in names if name not in listed() and name.rpartition("/")[0] not in listed()}
    assert not missing
    assert {entry for entry in listed() if "/" not in entry or not entry.startswith("api/")} <= names | {
        name.removesuffix("/README") for name in names
    }


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_to_a_page_leads_to_it(path: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s:]*)#?([^)\s:]*)\)", path.read_text()):
        target = (path.parent / link).resolve() if link else path
        assert target.exists(), link
        assert not target.is_dir() or (target / "README.md").exists(), f"{link}: the site shows files"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}#{anchor}"


def test_the_page_of_the_articles_says_of_each_thing_where_it_is() -> None:
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", (DOCS / "from_the_articles.md").read_text(), re.MULTILINE)
    rows = [row for row in rows if row[0] != "in the articles"]
    assert len({thing for thing, _, _ in rows}) == len(rows) >= 56
    assert {state for _, state, _ in rows} == {"works", "partly", "left out"}
    assert all(re.search(r"\]\(", where) for _, state, where in rows if state == "works")


def test_the_site_needs_no_other_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    settings = runpy.run_path(str(DOCS / "conf.py"))
    assert (DOCS / "site" / "static" / settings["html_css_files"][0]).exists()
    assert "sphinx.ext.mathjax" not in settings["extensions"]
    texts = [path.read_text() for path in [DOCS / "conf.py", *DOCS.glob("site/*.py"), *DOCS.glob("site/static/*")]]
    assert not any("http:" in text or "https:" in text for text in texts)


def test_every_package_has_its_reference() -> None:
    import rlprims

    shown = " ".join(path.read_text() for path in DOCS.glob("api/*.rst"))
    documented = re.findall(r"^\.\. package:: (\S+)$", shown, re.MULTILINE)
    packages = {f"rlprims.{path.parent.name}" for path in Path(rlprims.__file__).parent.glob("*/__init__.py")}
    assert {f"rlprims.{name}" for name in rlprims._MODULES} | packages - {"rlprims.interop"} <= set(documented)


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, field in section.model_fields.items():
        yield prefix + key
        kinds = [
            kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(kind, type)
        ]
        for kind in kinds:
            if issubclass(kind, BaseModel) and kind is not BoundFunction:
                yield from keys(kind, f"{prefix}{key}.")


def test_every_setting_of_the_migration_is_one() -> None:
    """The right column; below a primitive stand its own hyperparameters, which the presets' tests know."""
    known = set(keys(Config))
    prefix = ""
    for line in (DOCS / "migration.md").read_text().splitlines():
        cells = line.split(" | ")
        for key in re.findall(r"`([a-z_.0-9]+)`", cells[1]) if line.startswith("| `") else []:
            if key.split(".")[0] not in Config.model_fields and "." not in key:
                key = f"{prefix}{key}"
            if key.split(".")[0] not in Config.model_fields or hasattr(rewards, key.removeprefix("rewards.")):
                continue  # a function
            prefix = key.rpartition(".")[0] + "."
            stage = ".".join(key.split(".")[:2])
            below_a_primitive = stage.removeprefix("algorithm.") in Algorithm.model_fields
            assert key in known or below_a_primitive, key


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    import formulas

    yield formulas
    del sys.modules["formulas"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("With A_i = (s_i − μ) / (σ + ε) over the group.", ["A_i = (s_i − μ) / (σ + ε)"]),
        ("loss = −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A), where", None),
        ("The response's reward is 0, or a number.", []),
        ("verl 0.9 and NeMo-RL skip too (arXiv:1506.02438), eqs. 10 and 16.", []),
        ("ρ = exp(mean of d over the response's tokens): a mean", ["ρ = exp(mean of d over the response's tokens)"]),
        ("int (B+1,) if packed", []),
        ("A token of weight 0 with A > 0 counts", ["A > 0"]),
    ],
)
def test_formulas_in_prose(formulas, text: str, found: list[str] | None) -> None:
    parts = list(formulas.split(text))
    assert "".join(part for _, part in parts) == text
    expected = [text.removesuffix(", where")] if found is None else found
    assert [part for formula, part in parts if formula] == expected


def test_a_formula_as_mathml(formulas) -> None:
    made = formulas.mathml("x_t² + sqrt(σ)")
    assert made == (
        '<math class="formula"><msubsup><mi>x</mi><mi>t</mi><mn>2</mn></msubsup><mo>+</mo>'
        "<msqrt><mi>σ</mi></msqrt></math>"
    )


def test_decisions_name_what_there_is() -> None:
    """A name in code marks that is in no file of ours is a decision that has gone stale."""
    ours = [*(ROOT / "rlprims").rglob("*.py"), *(ROOT / "rlprims").rglob("*.json"), ROOT / "pyproject.toml"]
    ours += (ROOT / "tests").glob("*.py")
    text = "\n".join([*(path.read_text() for path in ours), *(path.stem for path in ours)])
    known = set(re.findall(r"\w+", text)) | {"library", "custom_op"}  # torch's, which was tried and left
    for page in (DOCS / "decisions").glob("0*.md"):
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            assert {word for word in re.findall(r"[A-Za-z]\w+", code) if not word.endswith("_")} <= known, (
                page.name,
                code,
            )


def test_the_picture_of_the_readme_is_the_notebook_s() -> None:
    cells = json.loads((DOCS / "notebooks" / "one_token_six_algorithms.ipynb").read_text())["cells"]
    stored = [o["data"]["image/png"] for cell in cells for o in cell.get("outputs", ()) if "image/png" in o["data"]]
    picture = "docs/six-algorithms.png"
    assert f"]({picture})" in (ROOT / "README.md").read_text()
    assert (ROOT / picture).read_bytes() == base64.b64decode(stored[0])


def test_the_pages_say_what_has_run_on_a_gpu() -> None:
    """Where a reader decides about one: the README, the setting, the page of executions."""
    assert re.search(r"## On a GPU\n.*its steps have run on CPUs alone", (DOCS / "execution.md").read_text(), re.DOTALL)
    for path in (ROOT / "README.md", DOCS / "trainer.md"):
        assert re.search(r"one process.*on a GPU|on a GPU.*one process", path.read_text(), re.IGNORECASE)
        assert "benchmarks/gpu.md" in path.read_text()


def test_the_versions_that_were_tried_are_of_today() -> None:
    assert version_table.PAGE.read_text() == version_table.page(), "run python -m tools.version_table"
