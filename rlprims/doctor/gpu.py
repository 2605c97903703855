"""``rlprims doctor --gpu``: what a device computes, beside a formula or another path, and how fast.

Without a config it makes a model of 13 M parameters, and for a CPU a tiny one. It saves nothing but the report.
"""

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import rlprims.logprobs  # noqa: F401  (registers formulas that have kernels)
from rlprims.algorithms import reinforce
from rlprims.data_proto import DataProto
from rlprims.doctor.cluster import ready, try_cluster
from rlprims.doctor.installation import Diagnosis
from rlprims.execution import UpdateReport
from rlprims.execution._config import TOLERANCE
from rlprims.execution._observed import WorkerReport
from rlprims.execution.hf._models import device_of
from rlprims.kernels import ACCELERATED, check, is_enabled
from rlprims.plan.memory import plan
from rlprims.plan.sizes import lengths_of, text_of
from rlprims.trainer.config import Config, load_config
from rlprims.trainer.session import build
from rlprims.trainer.sources.responses import prompt_rows

T = TypeVar("T")

_WORDS, _FIRST = 16384, 0x4E00  # the vocabulary of the model that is made: characters, which mean nothing here
_SETTINGS = Path(__file__).with_name("_gpu_settings.txt").read_text("utf-8")

MARKS = {True: "ok", False: "no", None: ""}


def made_config(folder: Path, overrides: list[str]) -> Config:
    """The settings of a run on a random model and random rows, which are written to a folder."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(chr(_FIRST + i) for i in range(_WORDS - 3))]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = Split(Regex("."), behavior="isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **special)
    scale = 4 if torch.cuda.is_available() else 1
    sizes = {"hidden_size": 64 * scale, "intermediate_size": 256 * scale, "num_hidden_layers": 2 + scale}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": _WORDS, "max_position_embeddings": 512}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        words_of = torch.randint(_FIRST, _FIRST + _WORDS - 3, (16, 64)).tolist()
        LlamaForCausalLM(LlamaConfig(initializer_range=0.1, **sizes, **ends)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": "".join(map(chr, row[: 8 + 3 * i])), "answer": "1"} for i, row in enumerate(words_of)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = _SETTINGS.format(folder=folder, tokens=32 * scale, prompts=4 * scale)
    (folder / "made.yaml").write_text(settings, encoding="utf-8")
    return load_config(folder / "made.yaml", overrides)


def try_gpu(config: Config, console: Any) -> Iterator[Diagnosis]:
    """Compare and time the parts of a run on the device of the config. An error is a finding."""
    device = device_of(config.model)
    yield Diagnosis("device", None, _name(device), "")
    parts: dict[str, Callable[..., Iterator[Diagnosis]]] = {"kernels": _kernels}
    parts |= {f"in {dtype}": partial(_in_dtype, dtype) for dtype in ("float32", "bfloat16")}
    for name, section in (parts | {"deterministic": _deterministic, "one card": _one_card}).items():
        try:
            yield from section(config, console, device)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            yield Diagnosis(name, False, reason, "report it with this page")


def _name(device: torch.device) -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type != "cuda":
        return f"{device.type}, {versions}"
    of = torch.cuda.get_device_properties(device)
    return f"{of.name}, {text_of(of.total_memory)}, CUDA {torch.version.cuda}, {versions}"


def _kernels(config: Config, console: Any, device: torch.device) -> Iterator[Diagnosis]:
    for name, accelerated in ACCELERATED.items():
        if (module := accelerated.modules.get(device.type)) is not None:
            found = check.compare(name, module, device)
            ratio = found.formula_seconds / found.kernel_seconds
            text = f"{found.difference:.1e} apart, {1e3 * found.kernel_seconds:.2f} ms, {ratio:.1f} x as fast"
            now = "on; RLPRIMS_KERNELS=0: off" if is_enabled(module) else f"off; RLPRIMS_KERNELS={module}: on"
            yield Diagnosis(f"kernel {name} beside its formula", found.difference <= check.TOLERANCE, text, now)


class _Measured(NamedTuple):
    """One pass over sampling, scores and an update, from the first weights."""

    batch: DataProto
    scores: Tensor
    plain: Tensor  # the scores with padding, or the scores themselves if not asked for
    after: Tensor  # the scores after the update
    report: UpdateReport
    worker: WorkerReport
    sampling: tuple[float, int | None]  # seconds, and waits for the device
    scoring: tuple[float, int | None]
    updating: tuple[float, int | None]


def _measured(config: Config, console: Any, device: torch.device, *, plain: bool = False) -> _Measured:
    parts = build(config, console)
    execution: Any = parts.execution
    with closing(execution):
        examples = parts.training.rows[: config.prompts_per_step]
        rows = prompt_rows(examples, range(len(examples)), copies=config.algorithm.group_size, first_sample=0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        sample = partial(execution.generate, rows, config.sampling, seed=0, prompt_width=None)
        batch, *sampling = _timed(sample, device)
        scores, *scoring = _timed(partial(execution.log_probs, batch), device)
        padded = execution.log_probs(batch, plain=True) if plain else scores
        report, *updating = _timed(partial(execution.update, ready(batch), reinforce()), device)
        [worker] = execution.reports()
        after, times = execution.log_probs(batch), (tuple(sampling), tuple(scoring), tuple(updating))
        return _Measured(batch, scores, padded, after, report, worker, *times)  # type: ignore[arg-type]


def _local(config: Config, dtype: str, **changes: Any) -> Config:
    model = config.model.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"model": model, "execution": "local", "replay": None, **changes})


def _in_dtype(dtype: Any, config: Config, console: Any, device: torch.device) -> Iterator[Diagnosis]:
    config = _local(config, dtype)
    again, first = (_measured(config, console, device, plain=i == 1) for i in range(2))  # the second is warm
    batch, mask, worker = first.batch, first.batch["response_mask"], first.worker
    for what, other in (("the sampler's", batch["rollout_log_probs"]), ("those with padding", first.plain)):
        apart = (first.scores - other)[mask].abs()
        found = f"{apart.mean():.1e} nats apart on average, {apart.max():.1e} at most"
        is_right = bool(apart.mean() <= TOLERANCE[dtype])
        yield Diagnosis(f"{dtype}: log-probs beside {what}", is_right, found, "rounding, or other numbers")
    apart = (first.after - again.after).abs().max()
    found = f"{apart:.1e} nats apart at most" if apart else "the same bits"
    yield Diagnosis(f"{dtype}: the same step twice", None, found, "so near is a killed run, continued")
    tokens, read, steps = int(mask.sum()), int(batch["attention_mask"].sum()), int(mask.sum(-1).max())
    seconds, waits = first.sampling
    found = f"{tokens / seconds:.0f} tokens/s, {len(batch)} rows, {1e3 * seconds / steps:.1f} ms a token"
    yield Diagnosis(f"{dtype}: sampling", None, found + _per(waits, steps, "token"), "execution: ray samples by vLLM")
    seconds, waits = first.scoring
    yield Diagnosis(f"{dtype}: log-probs", None, f"{read / seconds:.0f} tokens/s" + _per(waits, 1, "pass"), "")
    seconds, waits = first.updating
    share = worker.work["update"].flops / seconds / worker.peak_flops
    found = f"{read / seconds:.0f} tokens/s, {share:.1%} of {worker.peak_flops / 1e12:.3g} TFLOP/s"
    is_right = not first.report.skipped
    yield Diagnosis(f"{dtype}: an update", is_right, found + _per(waits, 1, "step"), "model FLOPs, as time/mfu")
    planned = plan(config, lengths_of(config)).peak
    found = f"{text_of(worker.peak_memory)}, planned {text_of(planned)}"
    fits = worker.peak_memory <= 1.2 * planned if device.type == "cuda" else None  # a CPU's also has what was before
    yield Diagnosis(f"{dtype}: peak memory", fits, found, "rlprims plan says what needs it")


def _deterministic(config: Config, console: Any, device: torch.device) -> Iterator[Diagnosis]:
    config = _local(config, "bfloat16", deterministic=True)
    try:
        first, again = (_measured(config, console, device) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
    same = torch.equal(first.after, again.after)
    found = f"the same step twice: {'the same' if same else 'other'} bits; an update takes {first.updating[0]:.2f} s"
    yield Diagnosis("bfloat16, deterministic: true", same, found, "a killed run goes on as if it had not been")


def _timed(call: Callable[[], T], device: torch.device) -> tuple[T, float, int | None]:
    """The result, seconds, and how often the process waited for the device."""
    if device.type != "cuda":
        begun = time.perf_counter()
        return call(), time.perf_counter() - begun, None
    with warnings.catch_warnings(record=True, action="always") as said:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        begun = time.perf_counter()
        try:
            result = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    return result, seconds, sum("synchronizing" in str(each.message) for each in said)


def _per(waits: int | None, count: int, what: str) -> str:
    return "" if waits is None else f", {waits / count:.1f} waits for the device in a {what}"


def _one_card(config: Config, console: Any, device: torch.device) -> Iterator[Diagnosis]:
    missing = [name for name in ("ray", "vllm") if find_spec(name) is None]
    if missing or device.type != "cuda":
        why = f"{' and '.join(missing)} not installed" if missing else "no GPU: doctor --cluster CONFIG tries it"
        yield Diagnosis("Ray and vLLM on this card", None, why, "not tried")
        return
    ray = config.ray.model_copy(update={"colocate": True, "gpus_per_worker": config.ray.gpus_per_worker or 1.0})
    for found in try_cluster(config.model_copy(update={"execution": "ray", "ray": ray}), console):
        yield found._replace(what=f"Ray and vLLM: {found.what}")


def page(lines: list[Diagnosis]) -> str:
    """The findings as Markdown."""
    rows = [f"| {MARKS[line.ok]} | {line.what} | {line.found} | {line.note} |" for line in lines]
    return "\n".join(["# rlprims doctor --gpu", "", "| | what | found | meaning |", "|---|---|---|---|", *rows, ""])
