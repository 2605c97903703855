"""Writes docs/turns.svg: four turns, and the rows that ``merge`` makes of them. ``python -m tests.turns.picture``."""

from pathlib import Path

from rlprims.turns import Turn, merge

FILE = Path(__file__).parents[2] / "docs" / "turns.svg"
COMMAND = "python -m tests.turns.picture"
CELL, GAP, LEFT, TOP = 34, 40, 150, 62
WORDS = ("ask", "a", "b", "tool", "c", "d", "brief", "e", "f")
"""A token id is the number of a word."""
ASK, A, B, TOOL, C, D, BRIEF, E, F = range(len(WORDS))
TURNS = [
    ("turn 0", Turn([ASK], [A, B], [-0.5, -0.5])),
    ("turn 1: extends", Turn([ASK, A, B, TOOL], [C, D], [-0.5, -0.5])),
    ("turn 2: rewritten", Turn([BRIEF, TOOL], [E], [-0.5])),
    ("turn 3: a second try", Turn([ASK, A, B, TOOL], [F], [-0.5])),
]
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
role="img" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">
<title>Four turns and the three rows that merge makes of them</title>
<style>
  .ink {{ fill: #1c2733 }} .soft {{ fill: #5b6773 }}
  .sampled {{ fill: #e3f0fd; stroke: #2b78c2 }} .context {{ fill: #f1efe8; stroke: #8d8674 }}
  .shared {{ fill: #f1efe8; stroke: #2b78c2; stroke-dasharray: 3 2 }}
  @media (prefers-color-scheme: dark) {{
    .ink {{ fill: #e8edf2 }} .soft {{ fill: #a9b4bf }}
    .sampled {{ fill: #12324f; stroke: #5ba7ee }} .context {{ fill: #2f2d27; stroke: #a39c88 }}
    .shared {{ fill: #2f2d27; stroke: #5ba7ee }}
  }}
</style>"""


def text(x: float, y: float, words: str, style: str = "ink", size: float = 13, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}">{words}</text>'


def cells(y: int, tokens: tuple[int, ...], kinds: list[str]) -> list[str]:
    parts = []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        x = LEFT + i * CELL
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 3}" height="26" rx="4" stroke-width="1.4"/>')
        parts.append(text(x + (CELL - 3) / 2, y + 17, WORDS[token], size=11.5, anchor="middle"))
    return parts


def picture() -> str:
    turns = [turn for _, turn in TURNS]
    rows, every = merge(turns), {row.spans[-1]: row.spans for row in merge(turns, shared="every")}
    legend = ((12, "sampled", "sampled, trained"), (150, "context", "not sampled"), (262, "shared", "trained above"))
    parts = []
    for x, kind, words in legend:
        parts.append(f'<rect class="{kind}" x="{x}" y="10" width="14" height="14" rx="3"/>')
        parts.append(text(x + 20, 22, words, "soft"))
    y = TOP
    parts.append(text(12, y - 14, "the sampler's calls", size=14))
    for name, turn in TURNS:
        parts.append(text(12, y + 17, name, "soft"))
        kinds = ["context"] * len(turn.prompt_ids) + ["sampled"] * len(turn.sampled_ids)
        parts += cells(y, turn.token_ids, kinds)
        y += GAP
    y += 34
    parts.append(text(12, y - 14, "rows", size=14))
    for number, row in enumerate(rows):
        kinds = ["sampled" if valid else "context" for valid in row.response_mask]
        for span in set(every[row.spans[-1]]) - set(row.spans):
            kinds[span.start : span.stop] = ["shared"] * (span.stop - span.start)
        numbers = [str(span.turn) for span in row.spans]
        parts.append(text(12, y + 17, f"row {number}: turn{'s' * (len(numbers) > 1)} {' and '.join(numbers)}", "soft"))
        parts += cells(y, row.token_ids, kinds)
        y += GAP
    head = HEAD.format(width=LEFT + 6 * CELL + 30, height=y)
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture())
