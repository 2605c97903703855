"""Rows for `rlprims fit` from the samples that a run has recorded: right answers, and pairs of a right and a wrong one.

    rlprims train examples/words/samples.yaml                  # samples of the base model; it hardly learns
    python examples/words/stored.py runs/words-samples         # solved.jsonl and pairs.jsonl, beside its rollouts
    rlprims fit examples/words/sft.yaml
    rlprims fit examples/words/dpo.yaml

Both runs learn from the base model's own samples. Each prints the path of its model at the end;
`rlprims eval examples/words/grpo.yaml model.path=...` measures the accuracy of that model.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def groups(run: Path) -> list[list[dict[str, Any]]]:
    """The recorded samples, grouped by question."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        for sample in map(json.loads, file.read_text().splitlines()):
            found[file.name, sample["group"]].append(sample)
    return list(found.values())


def solved(group: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Demonstrations: the right responses that ended by themselves, each text once."""
    right = {s["response"]: s for s in group if s["score"] == 1 and s["ended"] == "stop"}
    return [{"prompt": s["prompt"], "response": s["response"]} for s in right.values()]


def pairs(group: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Pairs of a right and a wrong response, as many as there are of both."""
    right = [s for s in group if s["score"] == 1 and s["ended"] == "stop"]
    wrong = [s for s in group if s["score"] == 0]
    return [
        {"prompt": a["prompt"], "chosen": a["response"], "rejected": b["response"]}
        for a, b in zip(right, wrong, strict=False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory with rollouts")
    run = parser.parse_args().run
    recorded = groups(run)
    for name, rows_of in (("solved", solved), ("pairs", pairs)):
        rows = [row for group in recorded for row in rows_of(group)]
        path = run / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
