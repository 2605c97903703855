"""Tests use what users use. Where a test imports a private module or name, this says why, and a new one fails."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
IMPORT = re.compile(r"from (rlprims[\w.]*) import (\([^)]*\)|[^\n;]*)")
PRIVATE = re.compile(r"(?:^|[.\s(,])_[a-zA-Z]")
REASONS = {
    "the difficult batches of the laws, which a primitive's own tests use, too": """
        advantage/test_options advantage/test_regressions advantage/test_valid_rows
        algorithms/test_loss_terms algorithms/test_mixture audit/test_identify_presets test_docs
        test_finite_hyperparameters test_trajectories
    """,
    "single laws, and their effort, which check_* chooses by itself": "test_laws test_laws_slow",
    "parts of a rank or an engine in processes without Ray, beside one process": """
        execution/fsdp_ranks execution/tensor_ranks execution/test_execution_sets execution/v2_process
    """,
    "the wire between ranks and engines, which breaks on purpose": """
        execution/test_execution_ray_vision execution/test_execution_sync execution/test_execution_transfer
    """,
    "an environment or a cluster that the tests share": """
        execution/execution_contract execution/test_execution_ranks execution/test_execution_start
        execution/test_execution_v2_only trainer/shared_cluster trainer/test_cluster_pairs
    """,
    "what is decided before a cluster starts, or when a call of it fails": """
        execution/test_execution_cluster execution/test_execution_devices execution/test_execution_division
        execution/test_execution_options execution/test_execution_options_of_sampling execution/test_execution_reasons
        trainer/test_vision_run
    """,
    "the families of models that are served, each of which is tried": """
        execution/test_execution_balance execution/test_execution_head execution/test_execution_packed
        execution/test_execution_ropes execution/test_execution_routes execution/test_execution_vision
        execution/test_execution_zoo execution/vision_zoo vision/test_fit
    """,
    "a part of the models' computation beside a formula or transformers": """
        execution/test_execution_flops execution/test_execution_gpu execution/test_execution_half
        execution/test_execution_decode execution/test_execution_local execution/test_execution_sampler
        trainer/test_scale
    """,
    "one step of a method, against all possible steps": "batching/test_balance",
    "copies of files at a url, which a process keeps: a test makes it forget them": "test_storage trainer/test_copies",
    "a reading of a text or a pause that a verdict or a server's answer does not show": """
        rewards/test_code_readings rewards/test_code_verdicts rewards/test_remote
    """,
    "the guest of the sandbox is exchanged or asked": "rewards/test_sandbox rewards/test_reward_hacks",
    "the parser that reads the commands in files of the examples": "examples/test_clusters",
    "what a run says when it is killed, in a process without a run": "trainer/test_words",
    "the words that docstrings share": "test_described",
    "the rows of ranks and of micro-batches, and what a worker of a verifier reads": """
        vision/test_columns vision/test_episodes vision/test_rows
    """,
}


def private_imports(path: Path) -> list[str]:
    """Also those in programs that a test starts."""
    found = IMPORT.findall(path.read_text())
    return [module for module, names in found if PRIVATE.search(f"{module} {names}")]


def test_what_is_imported_privately_has_its_reason() -> None:
    found = {str(path.relative_to(TESTS))[:-3] for path in TESTS.rglob("*.py") if private_imports(path)}
    named = " ".join(REASONS.values()).split()
    assert found - set(named) == set(), "use the public name, or give the reason above"
    assert sorted(named) == sorted(set(named) & found), "these import nothing private any more, or are named twice"
