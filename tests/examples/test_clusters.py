"""The files for clusters, and the commands of the page for bad hours: they are what they should be, and parse."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rlprims._arguments import parser
from rlprims.trainer.config import Config
from tools.settings_tables import settings

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
KNOWN = {name for name, _ in settings(Config)} | {"profile", "algorithm.group_size"}
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
if [[ $1 == ray ]]; then exec sleep 60; fi
trap 'echo saved; exit 143' TERM
echo "$@"; sleep 60 & wait
"""


def check(command: str) -> None:
    options = parser().parse_args(shlex.split(command)[1:])
    assert {override.partition("=")[0] for override in getattr(options, "overrides", [])} <= KNOWN, command


def test_every_command_of_the_page_for_bad_hours_is_one() -> None:
    page = (ROOT / "docs" / "something_is_wrong.md").read_text()
    headings = ["It does not learn", "It ended badly", "It is slow", "It runs out of memory", "It hangs"]
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == headings
    commands = re.findall(r"`(rlprims .*?)`", page)
    assert len(commands) > 20
    for command in commands:
        check(command)
    named = {name for name in re.findall(r"`([a-z_.]+)(?:: .*?)?`", page) if "." in name} - {"run.yaml"}
    assert named <= KNOWN


def test_the_file_for_kubernetes_is_one() -> None:
    job = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())["spec"]
    check(job["entrypoint"])
    cluster = job["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        for container in pod["containers"]:
            places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert places.keys() == {volume["name"] for volume in pod["volumes"]}
            assert "/dev/shm" in places.values()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_file_for_slurm_runs_where_commands_of_slurm_run_here(tmp_path: Path) -> None:
    """The end of the time limit comes as SIGTERM to the script: the run ends first, and its exit code is the job's."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho first\n"), ("ray", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    script = ["bash", str(CLUSTERS / "slurm.sh"), "run.yaml", "ray.training_workers=2"]
    with subprocess.Popen(
        script, env=os.environ | here, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        command = job.stdout.readline()
        check(command)
        assert "ray.address=first:6379" in command
        job.terminate()
        assert job.stdout.readline() == "saved\n"
        assert job.wait(timeout=60) == 143
        os.killpg(job.pid, 15)  # what SLURM ends: Ray
