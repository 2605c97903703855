"""Check which packages are installed and what works on this machine, with the command that repairs a failure."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from rlprims._extras import hint
from rlprims.reports.terminal import make_table


class Finding(NamedTuple):
    """The result of one check: a row of the table."""

    what: str
    ok: bool
    found: str
    remedy: str


_TRAIN = hint("train")
_CLUSTER = "make install-ray, or see docs/execution.md"
_PACKAGES = (
    ("torch", "everything", "pip install torch"),
    ("tensordict", "DataProto", "pip install tensordict"),
    ("transformers", "execution: local", _TRAIN),
    ("safetensors", "checkpoints", _TRAIN),
    ("yaml", "configs", _TRAIN),
    ("rich", "tables and the progress line", _TRAIN),
    ("matplotlib", "rlprims plot", _TRAIN),
    ("peft", "model.lora", hint("lora")),
    ("ray", "execution: ray", _CLUSTER),
    ("aiohttp_cors", "ray job submit, Ray's dashboard", "pip install 'ray[default]'"),
    ("vllm", "ray.engine: vllm", _CLUSTER),
    ("sympy", "verifiers.math", hint("rewards")),
    ("tensorboard", "log_to: [tensorboard]", hint("track")),
    ("wandb", "log_to: [wandb]", hint("track")),
)
_BREAKS_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM's CPU build installs. They are linked against CUDA, so transformers cannot be imported."""


def run_checks(model: str | None = None) -> list[Finding]:
    """Run every check. If a model is given, check its end tokens, too.

    Raises:
        ValueError: the model cannot be found.
    """
    checks: list[Callable[[], Finding]] = [
        *(
            lambda name=name, purpose=purpose, remedy=remedy: _package(name, purpose, remedy)
            for name, purpose, remedy in _PACKAGES
        ),
        _accelerator,
        _foreign_packages,
        _ranks,
        _sleep,
        _memory,
    ]
    return [check() for check in checks] + ([] if model is None else [check_end_tokens(model)])


def table(findings: list[Finding], title: str = "rlprims doctor") -> Any:
    """Return the findings as a table for the terminal."""
    rows = [("ok" if f.ok else "no", f.what, f.found, "" if f.ok else f.remedy) for f in findings]
    styles = {"ok": "green", "no": "yellow"}
    return make_table(("", "what", "found", "to repair it"), rows, title=title, styles=styles)


def kernel_table() -> Any:
    """Compare each kernel with its formula on this machine; returns a table of differences, times and switches."""
    import torch

    import rlprims.logprobs
    import rlprims.scan  # noqa: F401  (both register formulas that have kernels)
    from rlprims.kernels import ACCELERATED, check, is_enabled

    columns = ("", "formula", "kernel", "device", "difference", "formula ms", "kernel ms", "now", "to change it")
    rows: list[tuple[str, ...]] = []
    for name, accelerated in ACCELERATED.items():
        for device, module in accelerated.modules.items():
            if (reason := check.missing(module, device)) is not None:
                rows.append(("-", name, module, device, "", "", "", "off", reason))
                continue
            found = check.compare(name, module, torch.device(device))
            enabled = is_enabled(module)
            rows.append(
                (
                    "ok" if found.difference <= check.TOLERANCE else "differs",
                    name,
                    module,
                    device,
                    f"{found.difference:.1e}",
                    f"{1e3 * found.formula_seconds:.2f}",
                    f"{1e3 * found.kernel_seconds:.2f}",
                    "on" if enabled else "off",
                    "off: RLPRIMS_KERNELS=0, or a list without it" if enabled else f"on: RLPRIMS_KERNELS={module}",
                )
            )
    styles = {"ok": "green", "differs": "red", "-": "dim"}
    return make_table(columns, rows, title="rlprims doctor --kernels", styles=styles)


def _package(name: str, purpose: str, remedy: str) -> Finding:
    what = f"{name} ({purpose})"
    if importlib.util.find_spec(name) is None:
        return Finding(what, False, "not installed", remedy)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # an import can raise any error
        return Finding(what, False, f"import fails: {type(error).__name__}: {str(error).splitlines()[0]}", remedy)
    return Finding(what, True, str(getattr(module, "__version__", "installed")), remedy)


def check_end_tokens(model: str) -> Finding:
    """Check whether tokenizer, chat template and generation config of a model use the same end token."""
    from rlprims.runs.end_tokens import end_token_mismatch, load_end_tokens

    tokenizer, ids = load_end_tokens(model)
    wrong = end_token_mismatch(tokenizer, ids)
    agreed = ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
    remedy = "set eos_token in tokenizer_config.json and eos_token_id in generation_config.json to what ends a message"
    return Finding(f"{model}: the end of a response", wrong is None, wrong or agreed, remedy)


def _accelerator() -> Finding:
    import torch

    if torch.cuda.is_available():
        found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; rlprims itself is untried on GPUs"
        return Finding("accelerator", True, found, "")
    return Finding("accelerator", True, f"none: everything runs on {os.cpu_count()} CPUs", "")


def _foreign_packages() -> Finding:
    import torch

    present = [name for name in _BREAKS_CPU_TORCH if importlib.util.find_spec(name) is not None]
    harmful = bool(present) and torch.version.cuda is None
    return Finding(
        "no CUDA-linked extras beside CPU torch",
        not harmful,
        ", ".join(present) or "none",
        f"pip uninstall -y {' '.join(present)}",
    )


def _ranks() -> Finding:
    import torch.distributed as dist

    found = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    return Finding(
        "torch.distributed (training ranks)", bool(found), ", ".join(found) or "no backend", "pip install torch"
    )


def _sleep() -> Finding:
    import torch

    frees = torch.cuda.is_available()
    found = "frees the device's memory" if frees else "accepted, and without effect on a CPU"
    return Finding("sleep of engines (ray.colocate)", True, found, "")


def _memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    enough = free > 2
    return Finding(
        "memory", enough, f"{free:.1f} GiB free", "a rank takes 0.5 GiB and an engine 0.8 GiB before the model"
    )
