"""A pool ends what does not end by itself, and loses nothing else."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlprims.rewards import verifiers
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import naive
from tests.rewards.misbehaving import child, obey, pid, sourced

LIMIT = 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(obey, workers=2, seconds=LIMIT, memory_mb=1024) as pool:
        yield pool


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(*processes: int) -> None:
    limit = time.monotonic() + 20
    while any(alive(process) for process in processes):
        assert time.monotonic() < limit, "left behind"
        time.sleep(0.05)


FATAL = {
    "hang": "timeout",
    "spin": "timeout",
    "spin in C": "timeout",
    "backtrack": "timeout",
    "ignore signals": "timeout",
    "be killed": "killed by SIGKILL",
    "crash": "killed by SIGSEGV",
    "exit": "worker exited",
    "sys.exit": "raised SystemExit",
    "fill": "raised MemoryError",
    "raise": "raised RuntimeError",
    "alarm": "raised Alarm",
    "None": "returned None",
    "nan": "returned nan",
    "text": "returned str",
}


@pytest.mark.parametrize("response", FATAL)
def test_pool_loses_one_score_for_one_bad_row(pool: Pool, response: str) -> None:
    responses = [str(i) for i in range(40)]
    responses[17] = response
    scores = pool(responses, [""] * 40)
    failure = scores.failures[17]
    assert failure is not None
    assert failure.cause == FATAL[response]
    assert math.isnan(scores.scores[17])
    assert [int(s) for i, s in enumerate(scores.scores) if i != 17] == [i for i in range(40) if i != 17]
    assert sum(f is not None for f in scores.failures) == 1


@pytest.mark.slow
def test_all_of_them_at_once(pool: Pool) -> None:
    responses = [r for bad in FATAL for r in ("7", bad)]
    scores = pool(responses, [""] * len(responses))
    assert scores.scores[::2].tolist() == [7.0] * len(FATAL)
    assert [f.cause if f else None for f in scores.failures[1::2]] == list(FATAL.values())


def test_pool_scores_as_in_process(pool: Pool) -> None:
    responses = [str(i) for i in range(1000)] + ["pred", "no score", "bool", "numpy"]
    there, here = (score(responses, [""] * len(responses)) for score in (pool, lambda r, a: naive(obey, r, a)))
    assert there.scores.nan_to_num(-1).equal(here.scores.nan_to_num(-1))
    assert there.columns["acc"].nan_to_num(-1).equal(here.columns["acc"].nan_to_num(-1))
    assert there.failures == here.failures


def test_answers_that_are_no_json_cost_themselves(pool: Pool) -> None:
    scores = pool(["1", "2", "3", "4"], [object(), np.float32(2), np.arange(3), {"a": [1]}])
    assert [f.cause if f else None for f in scores.failures] == ["not JSON", None, None, None]
    assert scores.scores[1:].tolist() == [2, 3, 4]


@pytest.mark.parametrize("response", ["", "\ud800", "\0", "é" * 10**6, "\r\n[1]\n"])
def test_any_text_crosses(pool: Pool, response: str) -> None:
    assert pool(["1", response, "2"], [""] * 3).scores.tolist() == [1.0, 0.0, 2.0]


def test_pool_of_no_rows(pool: Pool) -> None:
    assert pool([], []).scores.shape == (0,)


@pytest.mark.slow
def test_wrong_lengths_and_missing_columns(pool: Pool) -> None:
    with pytest.raises(ValueError, match="answers has 1 rows and responses has 2"):
        pool(["1", "2"], [""])
    with Pool(sourced, workers=1) as other:
        assert other(["", ""], ["", ""], {"data_source": ["a", "bcd"]}).scores.tolist() == [1, 3]
        with pytest.raises(ValueError, match="needs the columns"):
            other([""], [""])


@pytest.mark.slow
def test_options_and_tables_cross() -> None:
    with Pool(obey, {"bonus": 0.5}, workers=1) as pool:
        assert pool(["1"], [""]).scores.tolist() == [1.5]
    with Pool(verifiers.by_source, {"table": {"mine": verifiers.exact}}, workers=1) as pool:
        extra = {"data_source": ["mine", "openai/gsm8k", "unknown"]}
        scores = pool(["a", "#### 72", "a"], ["a", "72", "a"], extra)
        assert scores.scores[:2].tolist() == [1, 1]
        assert scores.causes["raised ValueError"].detail.startswith("no verifier for data_source='unknown'")


@pytest.mark.slow
def test_workers_are_recycled() -> None:
    with Pool(pid, workers=1, recycle_after=10) as pool:
        seen = pool([""] * 35, [""] * 35).scores.tolist()
    assert sorted(seen.count(worker) for worker in set(seen)) == [5, 10, 10, 10]


@pytest.mark.slow
def test_cpu_time_is_limited_by_itself() -> None:
    with Pool(obey, workers=1, seconds=60, cpu_seconds=1) as pool:
        scores = pool(["1", "spin", "2"], [""] * 3)
    assert scores.scores[[0, 2]].tolist() == [1, 2]
    assert scores.causes["CPU limit"].rows == 1


@pytest.mark.parametrize("verifier", ["tests.rewards.misbehaving.nothing", "no.such.module", lambda r, a: 1.0])
def test_a_pool_says_at_once_that_it_cannot_import(verifier: object) -> None:
    with pytest.raises(ValueError, match="cannot import"):
        Pool(verifier)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_closed_pool() -> None:
    pool = Pool(obey, workers=1)
    process = int(pool(["1"], [""]).scores[0])
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool(["1"], [""])
    assert process == 1


@pytest.mark.slow
def test_children_of_a_worker_end_with_it(tmp_path: Path) -> None:
    with Pool(child, workers=1, seconds=3 * LIMIT) as pool:  # time for the child to start on a loaded machine
        assert pool([str(tmp_path / "ids")], [""]).causes["timeout"].rows == 1
        wait_until_ended(*map(int, (tmp_path / "ids").read_text().split()))


SCRIPT = """
import sys
from rlprims.rewards.pool import Pool
if __name__ == "__main__":
    pool = Pool("tests.rewards.misbehaving.child", workers=2, seconds=1000)
    pool(sys.argv[1:], ["", ""])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphans_however_the_trainer_ends(tmp_path: Path, how: signal.Signals) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, files)], cwd=root, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not all(file.exists() and len(file.read_text().split()) == 2 for file in files):
        assert time.monotonic() < limit
        time.sleep(0.05)
    processes = [int(p) for file in files for p in file.read_text().split()]
    assert all(alive(p) for p in processes)
    os.kill(trainer.pid, how)
    trainer.wait(timeout=20)
    wait_until_ended(*processes)


@pytest.mark.slow
def test_an_interrupt_ends_the_rows_and_leaves_the_pool_usable() -> None:
    with Pool(obey, workers=1, seconds=1000) as pool:
        previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            with pytest.raises(KeyboardInterrupt):
                pool(["hang"], [""])
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert pool(["3"], [""]).scores.tolist() == [3.0]
