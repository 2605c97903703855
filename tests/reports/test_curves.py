from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from rich.table import Table

from rlprims.reports.curves import draw_curves, read_metrics, summary_table
from tests.reports.made_runs import MakeRun, evaluation, train


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_a_torn_last_line_is_left_out(make_run: MakeRun) -> None:
    run = make_run(metrics=[train(1), train(2), '{"kind": "train", "st'])
    assert [row["step"] for row in read_metrics(run)] == [1, 2]


def test_a_last_line_without_its_newline_counts_when_it_is_whole(make_run: MakeRun) -> None:
    run = make_run(metrics=[train(1), '{"kind": "train", "step": 2}'])
    assert [row["step"] for row in read_metrics(run)] == [1, 2]


def test_a_damaged_line_before_the_last_is_named(make_run: MakeRun) -> None:
    run = make_run(metrics=[train(1), '{"kind": "tr\n', train(3)])
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(run)


def test_numbers_that_json_does_not_have_are_none(make_run: MakeRun) -> None:
    run = make_run(metrics=['{"kind": "train", "step": 1, "loss": NaN, "lr": -Infinity}\n'])
    assert read_metrics(run) == [{"kind": "train", "step": 1, "loss": None, "lr": None}]


def test_a_path_that_is_no_run_is_refused_with_what_a_run_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the directory of a run, .* got one without metrics\.jsonl"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match=r"got no folder$"):
        read_metrics(tmp_path / "other")


def test_panels_without_numbers_are_left_out(make_run: MakeRun, figures: list[Figure], tmp_path: Path) -> None:
    run = make_run(metrics=[train(1, entropy=None), train(2, entropy=None, filter_yield=0.5), evaluation(2)])
    draw_curves([run], tmp_path / "curves.png")
    assert titles(figures[0]) == [
        "Evaluation accuracy",
        "Evaluation accuracy by tokens generated",
        "Training score",
        "Response length, tokens",
        "Groups kept by the filter",
    ]


def test_nulls_leave_gaps_not_zeros(make_run: MakeRun, figures: list[Figure], tmp_path: Path) -> None:
    run = make_run(metrics=[train(step, score=None if step == 2 else 1.0 * step, length=None) for step in range(1, 5)])
    draw_curves([run], tmp_path / "curves.png")
    (line,) = figures[0].axes[0].get_lines()
    assert line.get_xydata().tolist() == [[1, 1], [3, 3], [4, 4]]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_one_point_draws(make_run: MakeRun, tmp_path: Path, suffix: str) -> None:
    run = make_run(metrics=[train(1, grad_norm=0.0)])
    out = draw_curves([run], tmp_path / "deep" / f"curves.{suffix}")
    assert out.stat().st_size > 1000


def test_the_picture_is_wide_and_not_blank(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(metrics=[train(step) for step in range(60)])
    pixels = imread(draw_curves([run], tmp_path / "curves.png"))
    assert pixels.shape[1] == 1800
    assert pixels.std() > 0.01


def test_noise_is_smoothed_over_the_faint_raw_line(make_run: MakeRun, figures: list[Figure], tmp_path: Path) -> None:
    run = make_run(metrics=[train(step, score=1.0 + (-1) ** step, length=None) for step in range(200)])
    draw_curves([run], tmp_path / "curves.png")
    raw, smooth = figures[0].axes[0].get_lines()
    assert set(raw.get_ydata()) == {0.0, 2.0}
    assert raw.get_alpha() < 0.5
    assert all(abs(y - 1) < 0.2 for y in smooth.get_ydata())


def test_smoothing_keeps_a_constant_and_the_last_point_of_a_level(
    make_run: MakeRun, figures: list[Figure], tmp_path: Path
) -> None:
    run = make_run(metrics=[train(step, score=3.0, length=None) for step in range(21)])
    draw_curves([run], tmp_path / "curves.png")
    assert figures[0].axes[0].get_lines()[1].get_ydata() == pytest.approx([3.0] * 21)


@pytest.mark.parametrize(("peak", "scale"), [(2.0, "linear"), (50.0, "log")])
def test_a_gradient_norm_that_jumps_is_drawn_logarithmically(
    make_run: MakeRun, figures: list[Figure], tmp_path: Path, peak: float, scale: str
) -> None:
    rows = [train(step, score=None, length=None, grad_norm=peak if step == 5 else 1.0) for step in range(10)]
    draw_curves([make_run(metrics=rows)], tmp_path / "curves.png")
    assert figures[0].axes[0].get_yscale() == scale


def test_runs_are_named_by_algorithm_and_seed_and_twins_by_directory(
    make_run: MakeRun, figures: list[Figure], tmp_path: Path
) -> None:
    metrics = [train(1), train(2)]
    runs = [
        make_run("a", metrics=metrics),
        make_run("b", metrics=metrics),
        make_run("c", metrics=metrics, config="algorithm: {name: grpo}\nseed: 3"),
        make_run("cost_in_$_and_$", metrics=metrics, config=None),
        make_run("e", metrics=metrics, config="[: no yaml"),
    ]
    draw_curves(runs, tmp_path / "curves.png")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "dapo, seed 0 (a)",
        "dapo, seed 0 (b)",
        "grpo, seed 3",
        r"run cost_in_\$_and_\$",
        "run e",
    ]


def test_many_runs_have_as_many_colours(make_run: MakeRun, figures: list[Figure], tmp_path: Path) -> None:
    runs = [make_run(f"run{i}", metrics=[train(1), train(2)]) for i in range(12)]
    draw_curves(runs, tmp_path / "curves.png")
    colours = {str(line.get_color()) for line in figures[0].axes[0].get_lines()}
    assert len(colours) == 12


@pytest.mark.parametrize("metrics", [[], [{"kind": "train", "step": 1}], ["{"]])
def test_nothing_to_draw_is_an_error(make_run: MakeRun, tmp_path: Path, metrics: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_curves([make_run(metrics=metrics)], tmp_path / "curves.png")
    with pytest.raises(ValueError, match="nothing to draw in no runs"):
        draw_curves([], tmp_path / "curves.png")


def row(table: Table, number: int = 0) -> dict[str, str]:
    return {str(column.header): str(list(column.cells)[number]) for column in table.columns}


def test_the_table_tells_what_training_changed(make_run: MakeRun) -> None:
    ends = [evaluation(0, **{"sampled/length": 30, "sampled/truncated": 0.2}), train(1), train(2)]
    last = evaluation(30, **{"sampled/length": 40.25, "sampled/truncated": 0.05})
    run = make_run(metrics=[*ends, last], summary='{"seconds": 213.4}')
    assert row(summary_table([run])) == {
        "run": "run",
        "algorithm": "dapo",
        "seed": "0",
        "sampled %": "10.0 → 40.0",
        "greedy %": "50.0",
        "gain": "+30.0",
        "length": "30.0 → 40.2",
        "tokens": "30k",
        "seconds": "213",
    }


def test_the_table_takes_what_there_is(make_run: MakeRun) -> None:
    bare = make_run("bare", metrics=[], config=None, summary="{torn")
    short = make_run("short", metrics=[train(step, generated_tokens_total=5000 * step) for step in (1, 2)])
    table = summary_table([bare, short])
    assert list(row(table).values()) == ["bare", *"–" * 8]
    assert row(table, 1) | {"length": "31.0 → 32.0", "tokens": "10k", "seconds": "1", "gain": "–"} == row(table, 1)


def test_the_table_says_why_responses_have_no_score(make_run: MakeRun) -> None:
    failing = [train(1, **{"failures/timed out": 2}), train(2, **{"failures/raised": 1, "failures/timed out": 3})]
    table = summary_table([make_run("failing", metrics=failing), make_run("fine", metrics=[train(1)])])
    assert row(table)["unscored"] == "5 timed out, 1 raised"
    assert row(table, 1)["unscored"] == "–"
    assert "unscored" not in row(summary_table([make_run("scored", metrics=[train(1)])]))


def test_markup_in_a_directory_name_is_not_read(make_run: MakeRun) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(summary_table([make_run("[red]name", metrics=[])]))
    assert "[red]name" in captured.get()
