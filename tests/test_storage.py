"""Files at a url: what is fetched, once for each version, whole or not at all."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from rlprims._storage import local_copy, reached
from rlprims.execution import ModelConfig
from rlprims.runs.files import files_of

ROOT = Path(__file__).parents[1]
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer/merges.txt": b"a b"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLPRIMS_CACHE", str(tmp_path / "cache"))
    local_copy.cache_clear()
    return tmp_path / "cache"


@pytest.fixture(params=["memory", "file"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The url of a folder with FILES."""
    url = f"memory://{tmp_path}/m" if request.param == "memory" else f"file://{tmp_path}/there/m"
    fs, root = fsspec.url_to_fs(url)
    for name, content in FILES.items():
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", content)
    return url


def content(folder: str) -> dict[str, bytes]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_folder_and_a_file_are_copied_under_their_names(server: str) -> None:
    folder = local_copy(server)
    assert content(folder) == FILES
    assert Path(folder).name == "m"
    assert content(local_copy(server, weights=False)) == {k: v for k, v in FILES.items() if k != "model.safetensors"}
    file = Path(local_copy(f"{server}/config.json"))
    assert (file.name, file.read_bytes()) == ("config.json", b"{}")


def test_wildcards_name_files_as_on_a_disk(server: str) -> None:
    assert [path.name for path in files_of(f"{server}/*.json")] == ["config.json"]
    assert [path.name for path in files_of(f"{server}/*/*.txt")] == ["merges.txt"]


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "/data/model", "runs/a/policy", "../x"])
def test_what_is_no_url_stays_as_it_is(path: str, cache: Path) -> None:
    assert local_copy(path) == path
    assert not cache.exists()


def test_a_version_is_fetched_once_and_a_new_one_again(server: str) -> None:
    """A process keeps to its version; ``cache_clear`` stands for the next process."""
    first = local_copy(server)
    (Path(first) / "config.json").write_bytes(b"marked here")
    local_copy.cache_clear()
    assert content(local_copy(server))["config.json"] == b"marked here"  # it was not fetched again
    fs, root = fsspec.url_to_fs(server)
    fs.pipe_file(f"{root}/config.json", b'{"new": 1}')
    assert local_copy(server) == first
    local_copy.cache_clear()
    assert content(local_copy(server)) == FILES | {"config.json": b'{"new": 1}'}
    assert content(first)["config.json"] == b"marked here"


FETCH = "import tests.slow_files; from rlprims._storage import local_copy; print(local_copy('slow://{}'))"


def fetching(folder: Path, log: Path, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", FETCH.format(folder)]
    environment = {**os.environ, "SLOW_LOG": str(log), **variables}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def write_files(folder: Path) -> None:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_a_killed_download_leaves_no_half_copy(tmp_path: Path, cache: Path) -> None:
    there, log = tmp_path / "there", tmp_path / "log"
    write_files(there)
    process = fetching(there, log, SLOW_STOP="merges.txt")
    while not log.exists() or "merges.txt" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not [path for path in cache.iterdir() if path.is_dir() and path.suffix == ""]
    output, _ = fetching(there, log).communicate()
    assert content(output.strip()) == FILES
    assert not list(cache.glob("*.writing"))


def test_processes_at_once_fetch_one_copy(tmp_path: Path) -> None:
    there, log = tmp_path / "there", tmp_path / "log"
    write_files(there)
    outputs = {process.communicate()[0] for process in [fetching(there, log) for _ in range(4)]}
    assert len(outputs) == 1
    assert content(outputs.pop().strip()) == FILES
    assert sorted(log.read_text().split()) == sorted(str(there / name) for name in FILES)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nothing/here", "memory://nothing/here: no such file or folder"),
        ("memory://nothing/*.jsonl", "memory://nothing/*.jsonl: no such file or folder"),
        ("nowhere://a/b", "nowhere://a/b: Protocol not known: nowhere"),
        ("s3://a/b", "s3://a/b: Install s3fs to access S3"),
    ],
)
def test_errors_are_one_line_with_the_url(url: str, message: str) -> None:
    if url.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(ValueError, match="://") as caught:
        local_copy(url)
    assert str(caught.value) == message


def test_an_error_of_a_client_of_any_class_names_the_url() -> None:
    with pytest.raises(ValueError, match=r"^memory://x: Access Denied$"), reached("memory://x"):
        raise RuntimeError("Access Denied\nand a page of the client's own words")


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, cache: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe(f"{tmp_path}/evil/config.json", b"{}")
    fs.store[f"{tmp_path}/evil/../../../../escaped"] = fs.store[f"{tmp_path}/evil/config.json"]
    with pytest.raises(ValueError, match="leaves the folder"):
        local_copy(f"memory://{tmp_path}/evil")
    assert not list(tmp_path.rglob("*escaped*"))


def test_every_model_of_a_config_is_fetched_and_no_server(server: str) -> None:
    url = "http://host:8000/v1"
    roles = {"path": server, "reference": server, "critic": "org/name", "reward": f"{server}/tokenizer"}
    model = ModelConfig(**roles, teacher=url)
    here = model.here()
    assert content(here.path) == FILES
    assert here.reference == here.path
    assert content(str(here.reward)) == {"merges.txt": b"a b"}
    assert (here.critic, here.teacher) == ("org/name", url)
    several = ModelConfig(path="a", teacher={"one": server, "two": "b"}).here().teacher
    assert several == {"one": here.path, "two": "b"}
    assert model.path == server  # the config that is written keeps the url
