"""Starts one sandboxed program from the trainer's process, reads its output, and enforces its limits."""

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

_SETUP = Path(__file__).with_name("_setup.py")
_LONGEST_START = 30.0


class IsolationError(RuntimeError):
    """The isolation cannot be set up on this machine."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program."""

    seconds: float = 5.0
    """Wall time; also the CPU time of each process, rounded up to a whole second."""
    memory_mb: int = 512
    """Address space of each process."""
    processes: int = 16
    """Processes and threads at once."""
    disk_mb: int = 64
    """Size of its temporary directory, which is in memory."""
    files: int = 1024
    """Files and folders in its temporary directory; not limited without isolation."""
    output_bytes: int = 2**20
    """Size of stdout, and of stderr."""


class Result(NamedTuple):
    """The result of a program."""

    status: str
    """``finished``, ``signal``, ``timeout`` or ``output limit``."""
    code: int | None
    """The exit code, or the number of the signal."""
    stdout: str
    stderr: str
    isolation: str
    """``namespaces`` or ``none``."""

    @property
    def ok(self) -> bool:
        return self.status == "finished" and self.code == 0


@cache
def isolation() -> str:
    """The isolation on this machine: ``namespaces``, or ``none`` and the reason. It is tested with one program."""
    try:
        guest = Guest({"main.py": ""}, Limits(), isolate=True)
    except OSError as error:
        return f"none: {error}"
    with guest:
        try:
            result = guest.wait()
        except IsolationError as error:
            return f"none: {error}"
    # If Python did not start inside, every program would get the score 0.
    return "namespaces" if result.ok else f"none: Python does not start inside: {result.stderr.strip() or result.code}"


def choose(allow_unisolated: bool) -> bool:
    """Whether programs are isolated. Raises ``IsolationError`` if they cannot be, unless that is allowed."""
    found = isolation()
    if found != "namespaces" and not allow_unisolated:
        raise IsolationError(
            f"the isolation of this machine is {found}, expected namespaces, because a model wrote the code. Allow "
            "user namespaces (Linux 5.14 or later; in a container: seccomp and AppArmor profiles that permit unshare "
            "and mount), run programs elsewhere (code_stdin's run), or set allow_unisolated=True"
        )
    return found == "namespaces"


class Guest:
    """A running program. ``wait`` returns when it ends; leaving the context kills it and all processes it started."""

    def __init__(
        self,
        files: Mapping[str, str],
        limits: Limits,
        *,
        isolate: bool,
        main: str = "main.py",
        stdin: str = "",
        channel: socket.socket | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        self._limits, self._isolate = limits, isolate
        self._folder = None if isolate else tempfile.mkdtemp(prefix=f"rlprims-sandbox-{os.getpid()}-")
        self._status, theirs = os.pipe()
        python = os.path.realpath(sys.executable)
        job = {
            "parent": os.getpid(),
            "status": theirs,
            "channel": channel and channel.fileno(),
            "isolate": isolate,
            "folder": self._folder,
            "files": dict(files),
            "main": main,
            "stdin": stdin,
            "python": python,
            "readable": _readable(),
            "packages": _folders(tuple(packages)),
            "cpu_seconds": int(limits.seconds) + 1,
            "files_at_most": limits.files,
            **{name: asdict(limits)[name] for name in ("memory_mb", "processes", "disk_mb")},
        }
        try:
            self._process = subprocess.Popen(
                [python, "-I", "-S", "-B", str(_SETUP)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs] if channel is None else [theirs, channel.fileno()],
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            pipe.write(json.dumps(job).encode())
        descriptors = (self._process.stdout.fileno(), self._process.stderr.fileno(), self._status)
        self._texts = {fd: bytearray() for fd in descriptors}
        self._open = set(self._texts)
        self.deadline = time.monotonic() + _LONGEST_START
        self.ready = False
        self._stopped: str | None = None

    @property
    def files(self) -> set[int]:
        """Descriptors to wait for."""
        return self._open

    def step(self, ready: Sequence[int] | set[int]) -> bool:
        """Read available output; returns whether the program has ended or exceeded a limit."""
        for fd in self._open & set(ready):
            part = os.read(fd, 1 << 16)
            self._texts[fd] += part
            if not part:
                self._open.discard(fd)
            if fd != self._status and len(self._texts[fd]) > self._limits.output_bytes:
                self._stopped = "output limit"
        if not self.ready and b"ready\n" in self._texts[self._status]:
            self.ready = True
            self.deadline = time.monotonic() + self._limits.seconds
        # A process that the program left behind may still have its stdout open, so the status decides.
        ended = self._status not in self._open or self._reported_end() is not None
        if self._stopped is None and not ended and time.monotonic() >= self.deadline:
            self._stopped = "timeout"
        return ended or self._stopped is not None

    def wait(self) -> Result:
        while not self.step(wait_for(self)):
            pass
        return self.result()

    def result(self) -> Result:
        """How the program ended. Processes that still run are killed."""
        self._end()
        texts = [bytes(text[: self._limits.output_bytes]) for text in self._texts.values()]
        stdout, stderr = (text.decode("utf-8", "replace") for text in texts[:2])
        report_lines = self._texts[self._status].decode("utf-8", "replace").splitlines()
        errors = [line.removeprefix("error ") for line in report_lines if line.startswith("error ")]
        if errors or not self.ready:
            raise IsolationError(" ".join(errors) or stderr.strip() or "the sandbox did not start")
        kind = "namespaces" if self._isolate else "none"
        if self._stopped is not None:
            return Result(self._stopped, None, stdout, stderr, kind)
        how, code = self._reported_end() or ("signal", int(signal.SIGKILL))
        return Result("finished" if how == "exit" else "signal", code, stdout, stderr, kind)

    def _reported_end(self) -> tuple[str, int] | None:
        """``exit`` or ``signal``, and the code, if the status has them."""
        for line in self._texts[self._status].decode("utf-8", "replace").splitlines(keepends=True):
            how, _, code = line.partition(" ")
            if how in ("exit", "signal") and line.endswith("\n"):
                return how, int(code)
        return None

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # it kills the process tree and exits
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL) if self._process.poll() is None else None
        self._process.wait()
        for fd in list(self._open):  # output that was written before the end
            os.set_blocking(fd, False)
            with contextlib.suppress(OSError):
                while len(self._texts[fd]) <= self._limits.output_bytes and (part := os.read(fd, 1 << 16)):
                    self._texts[fd] += part
            self._open.discard(fd)

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        os.close(self._status)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def wait_for(*guests: Guest) -> set[int]:
    """Wait until a descriptor of the guests is readable, or until their first deadline; returns the readable ones."""
    left = min(guest.deadline for guest in guests) - time.monotonic()
    return set(select.select([fd for guest in guests for fd in guest.files], [], [], max(0.0, left))[0])


@cache
def _readable() -> list[str]:
    """The paths of the system's libraries and of Python."""
    paths = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    return paths if prefix == "/usr" or prefix.startswith("/usr/") else [*paths, prefix]


@cache
def _folders(packages: tuple[str, ...]) -> dict[str, str]:
    """The folders of packages of this environment, and of the libraries that belong to their wheels."""
    found: dict[str, str] = {}
    for package in packages:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"packages has {package!r}, which is not a package of this environment: install it")
        folder = Path(next(iter(spec.submodule_search_locations))).resolve()
        libraries = folder.with_name(f"{package}.libs")
        found |= {path.name: str(path) for path in (folder, libraries) if path.is_dir()}
    return found
