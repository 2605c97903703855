"""vLLM's own server for a test."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a server that is ready; it ends with the block."""
    port = 8000 + os.getpid() % 20000
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager", *options]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True) as server,
    ):
        try:
            for _ in range(600):
                assert server.poll() is None, log.read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, 9)
