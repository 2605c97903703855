"""Check which packages are installed and what works on this machine, with the command that repairs a failure."""

import importlib
import importlib.util
import os
from typing import Any, NamedTuple

from rlprims._extras import hint
from rlprims._json import beside
from rlprims.reports.terminal import make_table


class Diagnosis(NamedTuple):
    """The result of one check: a row of the table; ``ok`` is None for what is neither right nor wrong."""

    what: str
    ok: bool | None
    found: str
    note: str
    """What repairs it, or what the numbers mean."""


_PACKAGES = tuple(
    (row["package"], row["for"], row.get("install") or hint(row["extra"])) for row in beside(__file__, "_packages.json")
)
_BREAKS_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM's CPU build installs. They are linked against CUDA, so transformers cannot be imported."""


def run_checks(model: str | None = None) -> list[Diagnosis]:
    """Run every check. If a model is given, check its end tokens, too."""
    machine = (_accelerator, _foreign_packages, _memory)
    found = [*(_package(*package) for package in _PACKAGES), *(check() for check in machine)]
    return found + ([] if model is None else [check_end_tokens(model)])


def table(findings: list[Diagnosis], title: str = "rlprims doctor") -> Any:
    """Return the findings as a table for the terminal."""
    rows = [("ok" if f.ok else "no", f.what, f.found, "" if f.ok else f.note) for f in findings]
    styles = {"ok": "green", "no": "yellow"}
    return make_table(("", "what", "found", "to repair it"), rows, title=title, styles=styles)


def _package(name: str, purpose: str, remedy: str) -> Diagnosis:
    what = f"{name} ({purpose})"
    if importlib.util.find_spec(name) is None:
        return Diagnosis(what, False, "not installed", remedy)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # an import can raise any error
        return Diagnosis(what, False, f"import fails: {type(error).__name__}: {str(error).splitlines()[0]}", remedy)
    return Diagnosis(what, True, str(getattr(module, "__version__", "installed")), remedy)


def check_end_tokens(model: str) -> Diagnosis:
    """Check whether tokenizer, chat template and generation config of a model use the same end token."""
    from rlprims.runs.end_tokens import end_token_mismatch, load_end_tokens

    tokenizer, ids = load_end_tokens(model)
    wrong = end_token_mismatch(tokenizer, ids)
    agreed = ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
    remedy = "set eos_token in tokenizer_config.json and eos_token_id in generation_config.json to what ends a message"
    return Diagnosis(f"{model}: the end of a response", wrong is None, wrong or agreed, remedy)


def _accelerator() -> Diagnosis:
    import torch

    if torch.cuda.is_available():
        found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}: rlprims doctor --gpu tries it"
        return Diagnosis("accelerator", True, found, "")
    return Diagnosis("accelerator", True, f"none: everything runs on {os.cpu_count()} CPUs", "")


def _foreign_packages() -> Diagnosis:
    import torch

    present = [name for name in _BREAKS_CPU_TORCH if importlib.util.find_spec(name) is not None]
    harmful, remedy = bool(present) and torch.version.cuda is None, f"pip uninstall -y {' '.join(present)}"
    return Diagnosis("no CUDA-linked extras beside CPU torch", not harmful, ", ".join(present) or "none", remedy)


def _memory() -> Diagnosis:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    remedy = "a rank takes 0.5 GiB and an engine 0.8 GiB before the model"
    return Diagnosis("memory", free > 2, f"{free:.1f} GiB free", remedy)
