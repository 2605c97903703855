"""``python -m benchmarks [--quick] [--only gae,...] [--out FILE]``: see docs/benchmarks/README.md."""

import argparse
import datetime
from pathlib import Path

import torch

from benchmarks import (
    _machine,
    _report,
    batching,
    data_proto,
    estimators,
    fused_head,
    gae,
    group_advantage,
    group_filter,
    histories,
    log_probs,
    losses,
    policy_loss,
    returns,
    rewards,
)
from benchmarks._harness import Row, measure, settle_allocator

FAMILIES = {
    "gae": gae.cases,
    "returns": returns.cases,
    "group": group_advantage.cases,
    "estimators": estimators.cases,
    "filter": group_filter.cases,
    "loss": policy_loss.cases,
    "losses": losses.cases,
    "logits": log_probs.cases,
    "head": fused_head.cases,
    "batch": data_proto.cases,
    "batching": batching.cases,
    "histories": histories.cases,
    "rewards": rewards.cases,
}
RESULTS = Path("docs/benchmarks/results.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="rlprims against verl and TRL, as ratios.")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: about a minute")
    parser.add_argument("--only", default=",".join(FAMILIES), help="of %(default)s")
    parser.add_argument("--out", type=Path, help=f"JSON file (default: {RESULTS}, for a whole run only)")
    options = parser.parse_args()
    families = options.only.split(",")
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--only names {', '.join(sorted(unknown))}: choose from {', '.join(FAMILIES)}")

    torch.set_num_threads(1)
    settle_allocator()
    seconds, min_rounds = (1.0, 3) if options.quick else (3.0, 5)
    rows: list[Row] = []
    print(_report.header())
    for family in families:
        for case in FAMILIES[family](options.quick):
            for row in measure(case, seconds, min_rounds):
                print(_report.text(row), flush=True)
                rows.append(row)

    whole = not options.quick and set(families) == set(FAMILIES)
    if (out := options.out or (RESULTS if whole else None)) is not None:
        facts = {
            "date": datetime.date.today().isoformat(),
            "machine": _machine.describe(),
            "versions": _machine.versions(),
            "rates": _machine.rates(),
            "threads": torch.get_num_threads(),
        }
        _report.write(rows, facts, out)
        print(f"written: {out} and {out.with_name('README.md')}")


if __name__ == "__main__":
    main()
