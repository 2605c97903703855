"""Run the words task by every algorithm here, and draw the learning curves together.

python examples/words/compare.py                       # all; a run that is there already is not repeated
python examples/words/compare.py dapo grpo --steps 60
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ALGORITHMS = ("dapo", "grpo", "ppo", "rloo", "remax", "reinforce")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare algorithms on the words task.")
    parser.add_argument("algorithms", nargs="*", default=ALGORITHMS, help=f"some of {', '.join(ALGORITHMS)}")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"), help="folder of the runs")
    options = parser.parse_args()

    rlprims = [sys.executable, "-m", "rlprims"]
    runs = []
    for name in options.algorithms:
        run = options.runs / f"{name}-{options.seed}"
        runs.append(str(run))
        if (run / "summary.json").exists():
            continue
        settings = [f"run_dir={run}", f"steps={options.steps}", f"seed={options.seed}"]
        subprocess.run([*rlprims, "train", str(HERE / f"{name}.yaml"), *settings], check=True)
    subprocess.run([*rlprims, "plot", *runs, "--out", str(options.runs / "curves.png")], check=True)


if __name__ == "__main__":
    main()
