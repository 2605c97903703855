"""The model of a config: its files, before memory is spent; its numbers on a few samples; a call of it that failed."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from pydantic import validate_call

from rlprims.data_proto import DataProto
from rlprims.doctor.installation import Diagnosis
from rlprims.execution.hf._families import VISION_MODELS, check_type
from rlprims.runs.checkpoint import newest_checkpoint, policy_of
from rlprims.runs.directory import RunDirectory
from rlprims.runs.end_tokens import tokens_beyond
from rlprims.trainer.config import Config
from rlprims.trainer.mismatch import disagreements
from rlprims.trainer.session import build
from rlprims.trainer.sources.responses import prompt_rows

_ROWS, _TOKENS = 4, 16


def try_model(config: Config, console: Any) -> Iterator[Diagnosis]:
    """Check the files of the model; if they are right, sample and score a few rows in this process, without a run."""
    found = list(check_files(config.model.here(weights=False).path))
    yield from found
    if config.data.environment is not None or not all(finding.ok for finding in found[:2]):
        return
    sampling = config.sampling.model_copy(update={"max_new_tokens": min(_TOKENS, config.sampling.max_new_tokens)})
    config = config.model_copy(update={"execution": "local", "replay": None, "sampling": sampling})
    parts = build(config, console)
    with closing(parts.execution):
        examples = parts.training.rows[:_ROWS]
        rows = prompt_rows(examples, range(len(examples)), copies=2, first_sample=0)
        batch = parts.execution.generate(rows, sampling, seed=config.seed, prompt_width=None)
        wrong = "; ".join(disagreements(config, parts.execution, batch))
    what = "log-probs of a row alone, in a micro-batch, by the sampler"
    yield Diagnosis(what, not wrong, wrong or "equal up to rounding", "see found")


def check_files(path: str) -> Iterator[Diagnosis]:
    """The type of a model, its vocabulary, and the kernels that its layers use."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    kind, text = config.model_type, config.get_text_config()
    is_known = type(config) in AutoModelForCausalLM._model_mapping or kind in VISION_MODELS
    wrong = None if is_known else f"{kind}: no causal language model"
    try:
        check_type(config)
    except ValueError as error:
        wrong = str(error).partition("; ")[0]
    yield Diagnosis("type of the model", wrong is None, wrong or kind, "use a type of docs/models.md")
    rows, largest = text.vocab_size, max([*tokenizer.get_vocab().values(), *tokenizer.all_special_ids])
    size = f"{rows} rows of the embedding, largest token {largest}"
    yield Diagnosis("vocabulary", not tokens_beyond(tokenizer, rows), size, "resize the embedding, or remove tokens")
    module = importlib.util.find_spec(type(config).__module__.replace("configuration_", "modeling_"))
    source = Path(module.origin).read_text() if module is not None and module.origin else ""
    used = {*re.findall(r'from_hub_with_fallback\("\w+", "(\w+)"', source)}
    missing = sorted(name for name in used if importlib.util.find_spec(name) is None)
    lacks = ", ".join(name.replace("_", "-").replace("fla", "flash-linear-attention") for name in missing)
    what = f"{lacks} not installed: transformers uses slow torch code" if missing else "none is missing"
    works = not missing or not torch.cuda.is_available()  # they need a GPU
    yield Diagnosis("kernels of the model", works, what, f"pip install {lacks}")


def call_again(path: Path, overrides: Sequence[str], console: Any) -> int:
    """Make the call of RUN/failed_call by the policy of the newest checkpoint, and other models as the run began."""
    batch, run = DataProto.load(path), RunDirectory.open(path.resolve().parent)
    call, config = batch.meta_info.pop("failed_call"), run.config(Config, overrides)
    begun: Any = {role: getattr(config.model, role) or config.model.path for role in ("reference", "teacher", "critic")}
    changes = {"execution": "local", "replay": None, "model": config.model.model_copy(update=begun)}
    with ExitStack() as held:
        newest = newest_checkpoint(run.checkpoints, warn=console.print) if any(run.checkpoints.glob("step_*")) else None
        weights = str(held.enter_context(policy_of(newest))) if newest else None
        parts = build(config.model_copy(update=changes), console, weights=weights)
        execution: Any = held.enter_context(closing(parts.execution))
        verb = getattr(execution.training, call["method"], None) or getattr(execution, call["method"])
        call["arguments"].pop("versions", None)  # of an engine's generate
        try:
            validate_call(config={"arbitrary_types_allowed": True})(verb)(batch, **call["arguments"])
        except ValueError as error:  # the command would show its line without its traceback
            raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None
    console.print(f"no error in one process. In the run: {call['error']}", highlight=False, soft_wrap=True)
    return 0
