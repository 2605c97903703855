import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.reports.rollouts import print_rollouts, read_rollouts
from rlprims.runs.records import record_lines
from tests.reports.made_runs import MakeRun, sample


def printed(run: Path, *, colours: bool = False, **options: object) -> str:
    file = io.StringIO()
    system = "truecolor" if colours else None
    console = Console(file=file, width=100, force_terminal=colours, color_system=system)
    print_rollouts(run, console=console, **options)
    return file.getvalue()


def test_a_row_is_read_whole(make_run: MakeRun) -> None:
    (row,) = read_rollouts(make_run(rollouts={7: [sample(3, baseline_scores=1.0)]}))
    assert (row.step, row.group, row.sample_id, row.answer, row.data_source) == (7, 1, 3, "4", "words/2")
    assert (row.score, row.shaped_score, row.baseline_score) == (1.0, 0.5, 1.0)
    assert row.tokens == ["<answer>", "4", "</answer>"]
    assert row.log_probs == [-0.1, -0.25, None]
    assert row.advantages == [1.5, -0.75, 0.0]
    assert (row.prompt_ids, row.response_ids) == ([1, 2], [3, 4, 5])
    assert row.columns == {"acc": 1.0, "failure": None}
    assert not row.is_left_out


def test_a_column_with_the_name_of_a_field_keeps_its_numbers(make_run: MakeRun) -> None:
    one = torch.ones(1)
    rows = DataProto.from_dict(
        tensors={
            **{"prompts": one[None].long(), "responses": one[None].long(), "attention_mask": torch.ones(1, 2).bool()},
            **{"sample_id": one.long(), "group": one.long(), "ended": torch.zeros(1, dtype=torch.int8)},
            **{"rollout_log_probs": -one[None], "scores": one, "status": 3 * one, "step": 4 * one, "acc": 5 * one},
        },
        non_tensors={name: ["a"] for name in ("prompt", "response", "answer", "data_source", "failure")}
        | {"prompt_ids": [[1]]},
    )
    (row,) = read_rollouts(make_run(rollouts={2: list(record_lines(2, rows, "trained", str))}))
    assert (row.status, row.step) == ("trained", 2)
    assert {name: row.columns[name] for name in ("status", "step", "acc")} == {"status": 3, "step": 4, "acc": 5}


def test_read_rollouts_leaves_missing_fields_empty(make_run: MakeRun) -> None:
    (row,) = read_rollouts(make_run(rollouts={1: [{"response": "four", "score": None}]}))
    assert (row.tokens, row.log_probs, row.advantages, row.score, row.group) == (["four"], [], None, None, None)
    assert "four" in printed(make_run("other", rollouts={1: [{"response": "four"}]}))


def test_the_last_step_is_the_default_and_another_can_be_chosen(make_run: MakeRun) -> None:
    run = make_run(rollouts={2: [sample(0)], 10: [sample(0), sample(1)]})
    assert [row.step for row in read_rollouts(run)] == [10, 10]
    assert [row.step for row in read_rollouts(run, 2)] == [2]
    with pytest.raises(ValueError, match="no rollouts of step 3; it has those of 2, 10"):
        read_rollouts(run, 3)


def test_a_run_without_rollouts_is_an_error(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="has no recorded rollouts"):
        read_rollouts(make_run())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"step": 1, "resp', "line 2"),
        ("[1, 2]\n", "line 2: expected a JSON object"),
        ('{"response_tokens": ["a", "b"], "advantages": [1.0]}\n', "line 2: advantages has 1 entries for 2 response"),
        ('{"response_tokens": "ab"}\n', "line 2: response_tokens is no list"),
        ('{"prompt_ids": 3}\n', "line 2: prompt_ids is no list"),
        ('{"score": 1' + "0" * 400 + "}\n", "line 2"),
    ],
)
def test_a_damaged_line_is_named(make_run: MakeRun, line: str, complaint: str) -> None:
    run = make_run(rollouts={1: [sample(0), line]})
    with pytest.raises(ValueError, match=rf"step_000001\.jsonl, {complaint}"):
        read_rollouts(run)


def test_groups_are_printed_together_with_their_numbers(make_run: MakeRun) -> None:
    rows = [
        sample(0),
        sample(2, shaped_scores=1.0),
        sample(1, advantages=[-0.5] * 3, ended="length", failure="raised", acc=-0.0),
    ]
    text = printed(make_run(rollouts={1: rows}))
    first, second = text.split("group 1")
    assert first.count("▸") == 2
    assert "score 1 · shaped 0.5 · advantage -0.75 to +1.50 · acc 1 · 3 tokens · trained" in first
    assert "advantage -0.50 · acc 0 · failure raised · 3 tokens · ended: length · trained" in " ".join(first.split())
    assert "shaped" not in second
    assert "What is 0 + 1?\nanswer: 4" in first


def test_count_limits_responses_and_says_what_is_left(make_run: MakeRun) -> None:
    text = printed(make_run(rollouts={1: [sample(i) for i in range(6)]}), count=3)
    assert text.count("▸ score") == 3
    assert "1 more in this group" in text
    assert "3 more responses in this step" in text
    with pytest.raises(ValueError, match="count=0: expected at least 1"):
        printed(make_run("other", rollouts={1: [sample(0)]}), count=0)


def test_source_filters_and_an_unknown_one_lists_the_others(make_run: MakeRun) -> None:
    run = make_run(rollouts={1: [sample(0), sample(2, data_source="words/3")]})
    assert "group 0" not in printed(run, source="words/3")
    with pytest.raises(ValueError, match="its sources are words/2, words/3"):
        printed(run, source="words/4")


def test_tokens_take_the_colour_of_their_advantage(make_run: MakeRun) -> None:
    text = printed(make_run(rollouts={1: [sample(0)]}), colours=True)
    assert "\x1b[38;2;0;165;80m<answer>" in text  # the largest of the step: full green
    assert "\x1b[38;2;193;75;72m4" in text  # half of it, negative: a paler red
    assert "</answer>\x1b" not in text  # zero: as the terminal writes


def test_printed_rollouts_show_dropped_samples_dim_and_last(make_run: MakeRun) -> None:
    left_out = [sample(i, status="acc is 1 throughout", advantages=None) for i in (0, 1)]
    text = printed(make_run(rollouts={1: [*left_out, sample(2)]}), colours=True)
    assert text.index("group 1") < text.index("group 0")
    assert "\x1b[2m<answer>" in text
    assert "2 not trained: acc is 1 throughout" in text


def test_a_response_cannot_steer_the_terminal(make_run: MakeRun) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202eevil \ud800 [red]markup[/red]\n"
    row = sample(0, prompt=hostile, answer=hostile, status=hostile, data_source=hostile, failure=hostile)
    text = printed(make_run(rollouts={1: [row | {"response_tokens": [hostile, "4", "5"]}]}))
    assert not set(text) & set("\x1b\x07\r\x9b\u202e\ud800")
    assert "⟨U+001B⟩[2J" in text
    assert "[red]markup[/red]" in text
    text.encode()
