"""The teacher's columns of a batch: which teacher scores which rows, after which prompt."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.data_proto._columns import object_array
from rlprims.execution import Models
from rlprims.execution._columns import left_padded
from rlprims.trainer.data import tokenized_prompt
from rlprims.trainer.sources.settings import SamplingSettings
from rlprims.trainer.teacher_server import served

TEACHER_COLUMNS = frozenset({"teacher_log_probs", "teacher_topk_log_probs", "teacher_mask"})
"""The columns that depend on a teacher."""


def teacher_columns(execution: Models, config: SamplingSettings, tokenizer: Any, batch: DataProto) -> dict[str, Tensor]:
    """The columns of a teacher that the algorithm reads.

    These are ``teacher_log_probs`` (B, T) of the sampled tokens; ``topk_ids`` and ``teacher_topk_log_probs`` (B, T, K);
    and ``teacher_mask`` (B, T), the response tokens of the rows for which the teacher has a prompt.
    """
    needs, support, columns = config.algorithm.needs, config.algorithm.support, dict[str, Tensor]()
    rows = batch[:]
    if config.data.teacher is not None:
        rows.non_tensor_batch["teacher"] = object_array([str(row[config.data.teacher]) for row in batch["fields"]])
    has_prompt = torch.ones(len(batch), dtype=torch.bool)
    if config.data.teacher_template is not None:
        has_prompt = _give_teacher_prompts(rows, config, tokenizer, execution)
    wants_top = "teacher_topk_log_probs" in needs
    if (url := config.model.teacher_url) is not None and (wants_top or "teacher_log_probs" in needs):
        ids, log_probs = served(url, rows, tokenizer, support.size if wants_top else 0)
        if "teacher_log_probs" in needs:
            columns["teacher_log_probs"] = log_probs[..., 0]
        if wants_top:
            columns |= {"topk_ids": ids[..., 1:], "teacher_topk_log_probs": log_probs[..., 1:]}
        needs = needs - columns.keys()
    if "teacher_log_probs" in needs:
        columns["teacher_log_probs"] = execution.teacher_log_probs(rows)
    if "teacher_topk_log_probs" in needs:
        if support.of == "student":
            rows["topk_ids"] = execution.top_tokens(batch, support.size)
        columns |= dict(execution.teacher_top(rows, support.size).batch.items())
    if "teacher_mask" in needs:
        columns["teacher_mask"] = batch["response_mask"] & has_prompt[:, None]
    return columns


def _give_teacher_prompts(rows: DataProto, config: SamplingSettings, tokenizer: Any, execution: Models) -> Tensor:
    """Replace the rows' prompts by the teacher's, in place; returns bool (B,), the rows that have a teacher's prompt.

    A row keeps its own prompt if the template has {sibling} and no other response of its group has a high enough score,
    or if prompt and response are longer than the window.
    """
    template, width = str(config.data.teacher_template), rows["prompts"].shape[1]
    attention = rows["attention_mask"].bool()
    lengths = attention[:, width:].sum(-1).tolist()
    siblings = _siblings(rows, config.data.teacher_success) if "{sibling}" in template else [None] * len(rows)
    prompts, has_prompt = list[list[int]](), list[bool]()
    for i, sibling in enumerate(siblings):
        own = rows["prompts"][i][attention[i, :width]].tolist()
        values = {**rows["fields"][i], "question": rows["question"][i]}
        ids = own
        if "{sibling}" not in template or sibling is not None:
            text = fill(template, {**values, "sibling": sibling})
            _, ids = tokenized_prompt(text, config.data, tokenizer)
        fits = len(ids) + lengths[i] <= execution.context_window
        prompts.append(ids if fits else own)
        has_prompt.append(prompts[-1] is not own)
    padded, in_prompt = left_padded(prompts, max(map(len, prompts)), execution.pad_token_id)
    rows.batch["attention_mask"] = torch.cat([in_prompt, attention[:, width:]], 1)
    rows.batch["prompts"] = padded
    return torch.tensor(has_prompt, dtype=torch.bool)


def _siblings(rows: DataProto, success: float) -> list[str | None]:
    """For each row the first other response of its group whose score is at least ``success``; None if none is."""
    groups, scores, texts = rows["group"].tolist(), rows["scores"].tolist(), rows["response"]
    good: dict[int, list[int]] = {}
    for i, (group, score) in enumerate(zip(groups, scores, strict=True)):
        if score >= success:
            good.setdefault(group, []).append(i)
    others = [next((j for j in good.get(group, []) if j != i), None) for i, group in enumerate(groups)]
    return [None if j is None else texts[j] for j in others]


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with the values in place of their names in braces. Braces in a value are not replaced.

    >>> fill("{question} Hint: {hint} {x}", {"question": "1+{hint}=?", "hint": 2})
    '1+{hint}=? Hint: 2 {x}'
    """
    return re.sub(r"\{(\w+)\}", lambda name: str(values[name[1]]) if name[1] in values else name[0], template)


def check_teacher(config: SamplingSettings) -> None:
    """Raise a ValueError for settings of a teacher that cannot be combined."""
    several = isinstance(config.model.teacher, dict)
    if several != (config.data.teacher is not None):
        got = f"model.teacher={config.model.teacher!r} and data.teacher={config.data.teacher!r}"
        need = "several models in model.teacher, and data.teacher, the field with a teacher's name, need each other"
        raise ValueError(f"{need}: got {got}")
    if config.model.teacher_url is not None:
        of_student = "teacher_topk_log_probs" in config.algorithm.needs and config.algorithm.support.of == "student"
        more = of_student or "teacher_hidden" in config.algorithm.needs or config.model.teacher_follows
        if more or config.sampling.temperature != 1 or config.sampling.truncates:
            needed = "temperature: 1, no truncation, and log-probs of the sampled or of the teacher's likeliest tokens"
            raise ValueError(f"model.teacher on a server needs {needed}")
    if config.execution != "local" and (config.model.teacher_follows or config.model.reference_follows):
        raise ValueError("model.teacher_follows and reference_follows need execution: local")
    if config.algorithm.needs & {"hidden", "teacher_hidden"}:
        apart = several or config.data.teacher_template is not None or "topk_log_probs" in config.algorithm.needs
        if apart or config.execution != "local" or not config.model.fused_head or config.model.replay_routes:
            needed = "execution: local, model.fused_head: true, one teacher, no data.teacher_template, routes or top-k"
            raise ValueError(f"the algorithm reads hidden states, which needs {needed}")
    if config.algorithm.needs & {"teacher_topk_log_probs", "teacher_hidden"} and config.sampling.truncates:
        compared = "the whole softmax of teacher and student, but sampling truncates it"
        raise ValueError(
            f"the algorithm compares {compared}: leave out top_k, top_p, min_p and all that removes tokens"
        )


def teacher_warnings(config: SamplingSettings) -> list[str]:
    """Settings of a teacher that are probably not intended."""
    uses, model = config.algorithm.needs_teacher, config.model
    if uses and model.teacher in (None, model.path) and config.data.teacher_template is None:
        return [
            "the teacher is the model itself with the same prompt, so teacher and student are equal at the start: "
            "set model.teacher, or data.teacher_template"
        ]
    if not uses and (model.teacher is not None or model.teacher_follows is not None):
        return [f"model.teacher is set, but nothing in {config.algorithm.name} uses a teacher: it is not loaded"]
    return []
