"""What one core does to weights and to rollouts: ``python -m benchmarks.host``, in ``.venv-ray``.

The rates of ``rlprims.plan.scale.Rates`` that are a processor's: bytes for a CPU second of one thread. Gloo's
is of the sender, less what it spends on packing, for each copy that it sends.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable
from time import process_time

import torch
from torch import Tensor

from rlprims.execution.ray._wire import Endpoint, Info, Receiver, Sender, checksums
from rlprims.plan.scale import copies_sent

NUMBERS, PARTS, TOKENS = 48 * 2**20, 6, 3000
INFOS = [[Info(f"w{i}", "bfloat16", [NUMBERS])] for i in range(PARTS)]


def cpu_seconds(run: Callable[[], object]) -> float:
    """The best of three."""
    best = float("inf")
    for _ in range(3):
        begun = process_time()
        run()
        best = min(best, process_time() - begun)
    return best


def of_weights() -> dict[str, float]:
    """A layer in float32 that engines get in bfloat16."""
    trained = torch.randn(NUMBERS)
    weights = trained.bfloat16()
    seconds = {
        "cast into the packed bytes": cpu_seconds(lambda: torch.zeros(NUMBERS, dtype=torch.bfloat16).copy_(trained)),
        "sum": cpu_seconds(lambda: checksums({"w": weights})),
    }
    prepared = sum(seconds.values())
    rates = {name: weights.nbytes / each for name, each in (seconds | {"both": prepared}).items()}
    for receivers in (1, 2, 3):
        spent = sending(trained, receivers) - PARTS * prepared
        rates[f"gloo to {receivers}, each copy"] = copies_sent(receivers) * PARTS * weights.nbytes / spent
    return rates


def sending(trained: Tensor, receivers: int) -> float:
    sender, spawn = Sender("127.0.0.1", 60.0), multiprocessing.get_context("spawn")
    places = [Endpoint(*sender.address, 1 + i, 1 + receivers, 60.0) for i in range(receivers)]
    processes = [spawn.Process(target=receive, args=(place,)) for place in places]
    for process in processes:
        process.start()
    sender.connect(receivers)
    begun = process_time()
    for part in INFOS:
        sender.send(part, [trained])
    sender.finish()
    seconds = process_time() - begun
    sender.close()
    for process in processes:
        process.join()
    return seconds


def receive(place: Endpoint) -> None:
    for _ in Receiver(place).parts(INFOS):
        pass


def of_rollouts() -> float:
    """A response as a run records it."""
    ids, numbers = torch.randint(151936, (TOKENS,)), torch.randn(TOKENS)

    def line() -> bytes:
        columns = {name: numbers.tolist() for name in ("rollout_log_probs", "old_log_probs", "advantages")}
        tokens = {"response_ids": ids.tolist(), "response_tokens": ["word"] * TOKENS, "response": "word" * TOKENS}
        return json.dumps(columns | tokens).encode()

    return len(line()) / cpu_seconds(line)


def main() -> None:
    torch.set_num_threads(1)
    rates = of_weights() | {"JSON of rollouts": of_rollouts()}
    sys.stdout.writelines(f"{name:<26} {rate / 1e9:6.3f} GB/s\n" for name, rate in rates.items())


if __name__ == "__main__":
    main()
