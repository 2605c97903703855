"""The image for GPUs: its install line, its constraints and pyproject.toml agree. Building it needs a registry."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
PINNED = {
    canonicalize_name(found[1]): found[2]
    for found in re.finditer(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints" / "cuda.txt").read_text(), re.MULTILINE)
}


def requirements_of(extra: str) -> list[Requirement]:
    """Those of the project with this extra, and of the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(map(Requirement, project["dependencies"] if extra == "" else project["optional-dependencies"][extra]))
    inner = [one for each in found if each.name == "rlprims" for name in each.extras for one in requirements_of(name)]
    return [each for each in found if each.name != "rlprims"] + inner


def test_the_image_installs_versions_that_the_project_allows() -> None:
    [installed] = re.findall(r'-c cuda\.txt "\.\[(\w+)\]" "ray\[default\]"', DOCKERFILE)
    wanted = requirements_of("") + requirements_of(installed)
    assert {"torch", "ray", "vllm", "transformers"} <= {each.name for each in wanted}
    for each in wanted:
        assert each.specifier.contains(PINNED[canonicalize_name(each.name)]), each
    assert {"opencensus", "py-spy"} <= PINNED.keys()  # of ray[default], without which KubeRay starts no job


def test_what_the_image_copies_is_there_and_it_does_not_run_as_root() -> None:
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    assert "constraints/cuda.txt" in copied
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE)[-1] != "root"
