"""Tables and explanations: what a reader sees."""

import doctest

import pytest

import examples.explain
from examples.explain import explain
from examples.simulate import Table
from rlprims import algorithms


def test_its_examples():
    assert doctest.testmod(examples.explain) == (0, 1)


@pytest.mark.parametrize("name", sorted(algorithms.PRESETS))
def test_an_explanation_names_every_stage_and_paper(name):
    page = explain(name)
    algorithm = algorithms.PRESETS[name]()
    for stage, part in algorithm.uses():
        assert f"{stage}: {part.path}" in page
    assert "Args:" not in page
    assert ">>>" not in page


def test_dapo_explained():
    page = explain("dapo")
    assert "clip_low=0.2, clip_high=0.28" in page
    assert "min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A)" in page
    assert "  arXiv:2503.14476  the algorithm" in page
    assert "  arXiv:1707.06347  policy_loss" in page
    assert repr(page) == page
    assert page._repr_html_().startswith("<pre")


def test_findings_are_printed():
    assert "error: advantage.grpo compares" in explain(algorithms.grpo().replace(group_size=1))


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"no preset 'dappo', expected one of .*dapo"):
        explain("dappo")


def test_html_escapes_what_a_model_wrote_and_the_terminal_names_its_controls():
    table = Table({"token": ["<script>", "\x1b[2J", "a\nb"], "push": [1.0, -2.0, 0.0]}, coloured=("push",))
    html = table._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html + repr(table)
    assert "a↵b" in repr(table)
    assert html.count("background:") == 2


def test_long_tables_are_cut_when_shown_and_whole_when_read():
    table = Table({"row": list(range(100))})
    assert repr(table).endswith("… 40 more rows")
    assert "40 more rows" in table._repr_html_()
    assert len(table) == len(list(table.rows())) == 100


def test_columns_must_be_as_long_and_names_must_exist():
    with pytest.raises(ValueError, match="expected the same number in each"):
        Table({"a": [1], "b": []})
    with pytest.raises(ValueError, match="no column 'b'"):
        Table({"a": [1]})["b"]
