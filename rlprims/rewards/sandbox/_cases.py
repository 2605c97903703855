"""Runs inside the sandbox: runs the program on one case after the other, each in a forked process.

A case is read from descriptor 3 as a line of JSON. Its result is written there, as a line of JSON and the bytes of the
output. The trainer compares the outputs: the expected outputs are not in the sandbox, so that they cannot be copied.
"""

import ast
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    channel = os.fdopen(os.dup(3), "rb")
    values, start = importlib.import_module("_values"), importlib.import_module("_start")
    start.begin()
    options = json.loads((HERE / "options.json").read_text(encoding="utf-8"))
    codes: list[types.CodeType] | None = None
    standard: dict[str, Any] = {}
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        trees = [ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8")) for name in ("before", "program")]
        if options["standard_imports"]:
            standard = start.standard_names(ast.Module([part for tree in trees for part in tree.body], []), {})
        codes = [compile(tree, f"{name}.py", "exec") for tree, name in zip(trees, ("before", "program"), strict=True)]
        source = (HERE / "program.py").read_text(encoding="utf-8")
        for package in options["packages"]:
            if package in source:
                importlib.import_module(package)  # once for all cases
    for line in channel:
        case = json.loads(line)
        ended: tuple[str, int | None, bytes] = ("exit", 1, b"")
        if codes is not None:
            stdin_fd = os.open(f".given-{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.unlink(f".given-{os.getpid()}")
            with open(stdin_fd, "wb", closefd=False) as stdin:
                stdin.write(case.get("stdin", "").encode("utf-8", "replace"))
            os.lseek(stdin_fd, 0, os.SEEK_SET)
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                answer(codes, standard, case, values, stdin_fd, writing)
                return
            os.close(stdin_fd)
            os.close(writing)
            ended = watch(child, reading, case["seconds"], case["output_bytes"])
            os.close(reading)
        how, code, output = ended
        message = json.dumps([how, code, len(output)]).encode() + b"\n" + output
        while message:
            message = message[os.write(3, message) :]
    os._exit(0)


def answer(
    codes: list[types.CodeType], standard: dict[str, Any], case: dict[str, Any], values: Any, stdin: int, writing: int
) -> None:
    """Run the program on one case. After the return the interpreter exits as after an ordinary program."""
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    cpu_seconds = int(case["seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    null = os.open(os.devnull, os.O_WRONLY)
    calls = "function" in case
    for old, new in ((stdin, 0), (null if calls else writing, 1), (null, 2), (writing, 3)):
        os.dup2(old, new)
    os.closerange(4 if calls else 3, 64)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if fd else "r"
        stream = open(fd, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["main.py"]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__dict__.update(standard)
    if calls:
        sys.setrecursionlimit(10_000)
        program.__name__ = "program"
    for code in codes:
        exec(code, program.__dict__)
    if calls:
        name = case["function"]
        function = program.__dict__.get(name) or getattr(program.__dict__["Solution"](), name)
        text = values.dumps(function(*values.unpack(case["arguments"]))).encode()
        while text:
            text = text[os.write(3, text) :]


def watch(child: int, reading: int, seconds: float, max_bytes: int) -> tuple[str, int | None, bytes]:
    """Wait for the child within its limits: how it ended, its exit code or signal, and its output."""
    deadline = time.monotonic() + seconds
    ended = os.pidfd_open(child)
    os.set_blocking(reading, False)
    output, stopped, waiting = bytearray(), None, [ended, reading]
    while stopped is None:
        ready = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]
        with suppress(BlockingIOError):
            while len(output) <= max_bytes and (part := os.read(reading, 1 << 16)):
                output += part
            waiting = [ended]  # the output has ended, or exceeds the limit
        if len(output) > max_bytes:
            stopped = "output limit"
        elif ended in ready:
            break
        elif time.monotonic() >= deadline:
            stopped = "timeout"
    os.close(ended)
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if stopped is not None:
        return stopped, None, bytes(output[:max_bytes])
    return ("exit" if status >= 0 else "signal"), abs(status), bytes(output)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
