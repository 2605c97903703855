"""The log-probs that a model gives to the responses of a recorded step: how far has the policy moved since?

In a notebook, with this file beside it::

    from recorded_log_probs import log_probs
    from rlprims import lab

    batch = lab.load_run("runs/words-dapo", step=50)
    policy = "runs/words-dapo/checkpoints/step_000050/policy"
    batch = batch.union(DataProto.from_dict({"log_probs": log_probs("runs/words-dapo", 50, policy)}))
"""

from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlprims.execution import Sampling
from rlprims.logprobs import from_logits
from rlprims.runs.records import read_rollouts


def log_probs(run: Path | str, step: int | None, policy: Path | str) -> Tensor:
    """(B, T), 0 in the padding, for the rows of ``lab.load_run(run, step)``, by one forward pass for each row.

    Args:
        run: a run directory.
        step: a recorded step; None: the last.
        policy: a Hugging Face model, such as the policy of one of the run's checkpoints.

    Raises:
        ValueError: nothing is recorded at that step, rows without token ids, or truncated sampling.
    """
    config = yaml.safe_load((Path(run) / "config.yaml").read_text(encoding="utf-8"))
    sampling = Sampling.model_validate(config.get("sampling", {}))
    if sampling.truncates:
        raise ValueError(f"{run} sampled with top_k, top_p or min_p: these log-probs are of whole distributions")
    rows = [row for row in read_rollouts(Path(run), step) if row.status != "greedy baseline"]
    if not all(row.prompt_ids and len(row.response_ids) == len(row.tokens) for row in rows):
        raise ValueError(f"{run}: some rows have no prompt_ids or response_ids, expected both in every row")
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    found = torch.zeros(len(rows), max(len(row.response_ids) for row in rows))
    with torch.inference_mode():
        for at, row in enumerate(rows):
            ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
            first = len(row.prompt_ids)
            logits = model(input_ids=ids).logits[:, first - 1 : -1]
            found[at, : len(row.response_ids)] = from_logits(logits, ids[:, first:], temperature=sampling.temperature)[
                0
            ]
    return found
