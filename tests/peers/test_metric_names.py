"""The names of ``metric_names`` are in the sources of the named library."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import rlprims

pytestmark = pytest.mark.peers
NAMES = json.loads((Path(rlprims.__file__).parent / "runs" / "metric_names.json").read_text())
FILES = {
    "verl": ["trainer/ppo/*.py", "trainer/ppo/v1/*.py", "workers/*.py", "workers/utils/*.py", "utils/**/*.py"],
    "trl": ["trainer/grpo_trainer.py"],
}
BY_PREFIX = ("timing_s/", "rollout_corr/", "critic/", "actor/")


@pytest.mark.parametrize("library", NAMES)
def test_the_names_are_in_the_sources(library):
    root = Path(find_spec(library).origin).parent
    text = "\n".join(path.read_text() for pattern in FILES[library] for path in root.glob(pattern))
    for name in NAMES[library].values():
        short = name.removeprefix("train/")
        prefix = next((p for p in BY_PREFIX if short.startswith(p)), "")
        by_parts = prefix and prefix in text and f'"{short.removeprefix(prefix)}"' in text
        assert f'"{short}"' in text or by_parts or short == "learning_rate", name  # the last is transformers' own
