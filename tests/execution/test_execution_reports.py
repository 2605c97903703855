"""The contract of ``reports`` and of profiles: every worker says what it did, once."""

import gzip
import json

from rlprims import algorithms
from rlprims.execution import ProfileConfig
from tests.execution.execution_contract import SAMPLING, WIDTH, prompts, training_batch


def test_each_worker_reports_what_it_did_and_once(fresh, one_engine):
    execution = fresh(algorithms.reinforce(), peak_tflops=0.5, **one_engine)
    batch = training_batch(execution)
    execution.reports()
    sampled = execution.generate(prompts(), SAMPLING, seed=1, prompt_width=WIDTH)
    execution.log_probs(batch)
    execution.update(batch, algorithms.reinforce())
    reports = execution.reports()
    assert len({report.worker for report in reports}) == len(reports)
    for verb, mask in (
        ("generate", sampled["response_mask"]),
        ("log_probs", batch["attention_mask"]),
        ("update", batch["attention_mask"]),
    ):
        done = [report.work[verb] for report in reports if verb in report.work]
        assert sum(work.tokens for work in done) == mask.sum()
        assert all(work.seconds > 0 and work.tokens > 0 for work in done)
        assert all((work.flops > 0) == (verb == "update") for work in done)
    for report in reports:
        assert 50e6 < report.peak_memory < 64e9
        assert report.peak_flops == 0.5e12 or "update" not in report.work
    assert not any(report.work for report in execution.reports())


def test_a_profile_of_each_process_but_this(fresh, one_engine):
    execution = fresh(algorithms.reinforce(), peak_tflops=0.5, **one_engine)
    batch = training_batch(execution)
    workers = {report.worker for report in execution.reports()} - {"local"}
    assert execution.stop_profile() == {}, "nothing was begun"
    execution.start_profile(ProfileConfig())
    execution.generate(prompts(), SAMPLING, seed=1, prompt_width=WIDTH)
    execution.update(batch, algorithms.reinforce())
    profiles = execution.stop_profile()
    assert set(profiles) == workers
    for worker, profile in profiles.items():
        names = {event.get("name") for event in json.loads(gzip.decompress(profile[".json.gz"]))["traceEvents"]}
        verb = "TrainingWorker.update" if worker.startswith("training") else "RolloutWorker.generate"
        assert verb in names
        assert verb in profile[".txt"].decode()
    assert execution.stop_profile() == {}
