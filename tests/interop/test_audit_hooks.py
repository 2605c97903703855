"""``examples/audit_hooks.py`` on the layouts of prime-rl 559b4477 (trainer/rl/data.py, batch.py) and NeMo-RL 7ea279ab.

The other hooks are run on what TRL, verl and OpenRLHF produce: tests/peers/test_audit_*.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from examples.audit_hooks import nemo_rl, prime_rl
from tests.audit.test_identify import centred, clipped, rollouts

PROMPT = 2
Run = pytest.CaptureFixture[str]


def whole(x: Tensor, fill: float = 0.0) -> Tensor:
    """A column of responses behind a prompt: these trainers have columns of the whole sequence."""
    return torch.cat([torch.full((len(x), PROMPT), fill, dtype=x.dtype), x], 1)


def prime_batch(batch: dict[str, Any], rows: list[int], pad: int = 0) -> tuple[dict[str, Any], Tensor]:
    """A packed micro-batch of some rows, (1, N), whose last sequence has the padding; and the trainer's log-probs."""
    columns = {"loss_mask": batch["response_mask"], "advantages": batch["advantages"]}
    columns |= {"inference_logprobs": batch["old_log_probs"], "log_probs": batch["log_probs"]}
    columns |= {"input_ids": torch.arange(80).view(16, 5)}
    lengths = [PROMPT + int(batch["response_mask"][row].sum()) for row in rows]
    packed = {}
    for name, x in columns.items():
        each = [whole(x)[row, :length] for row, length in zip(rows, lengths, strict=True)]
        packed[name] = torch.cat([*each, torch.zeros(pad, dtype=x.dtype)])[None]
    lengths[-1] += pad
    log_probs = packed.pop("log_probs")
    return {**packed, "ref_logprobs": None, "sequence_lengths": lengths}, log_probs


def test_the_micro_batches_of_prime_rl(capsys: Run) -> None:
    """Two packed micro-batches, each divided by the tokens of the step, so that their sum is the mean."""
    batch: dict[str, Any] = rollouts()
    batch["advantages"] = centred(batch)
    parts = [prime_batch(batch, list(range(7))), prime_batch(batch, list(range(7, 16)), pad=3)]
    tokens = batch["response_mask"].sum()
    for micro_batch, log_probs in parts:
        log_probs.requires_grad_()
        names = {"advantages": "advantages", "old_log_probs": "inference_logprobs", "response_mask": "loss_mask"}
        data = {ours: micro_batch[theirs] for ours, theirs in names.items()} | {"log_probs": log_probs}
        (clipped(data).sum() / tokens).backward()
    columns = prime_rl([each for each, _ in parts], [log_probs for _, log_probs in parts])
    said = capsys.readouterr().out
    assert "loss: losses.clipped_surrogate(clip_high=0.28)\n" in said
    assert "mean: losses.token_mean\n" in said
    assert columns["response_mask"].sum(1).tolist() == batch["response_mask"].sum(1).tolist()
    assert columns["micro_batches"].tolist() == [0] * 7 + [1] * 9
    rows = batch["response_mask"][8]
    assert columns["advantages"][8, PROMPT:][: len(rows)][rows].tolist() == batch["advantages"][8][rows].tolist()


def nemo_batch(batch: dict[str, Any]) -> dict[str, Any]:
    mask = batch["response_mask"]
    return {
        "input_ids": whole(torch.arange(80).view(16, 5), 7),
        "input_lengths": PROMPT + mask.sum(1),
        "token_mask": whole(mask.float()),
        "sample_mask": torch.ones(16),
        "generation_logprobs": whole(batch["old_log_probs"]),
        "prev_logprobs": whole(batch["old_log_probs"]),
        "reference_policy_logprobs": torch.zeros(16, PROMPT + 5),  # it was skipped
        "advantages": whole(batch["advantages"]),
    }


def test_the_train_data_of_nemo_rl(capsys: Run) -> None:
    batch: dict[str, Any] = rollouts()
    batch["advantages"] = centred(batch, eps=1e-6)
    prompts = torch.stack([batch["group_ids"], batch["group_ids"] + 1], 1)
    columns = nemo_rl(nemo_batch(batch), batch["scores"], prompts)
    assert "advantages: advantage.grpo\n" in capsys.readouterr().out
    assert "ref_log_probs" not in columns
    assert columns["group_ids"].tolist() == batch["group_ids"].tolist()


def test_a_sample_that_nemo_rl_masks_is_not_learned() -> None:
    batch: dict[str, Any] = rollouts()
    batch["advantages"] = centred(batch)
    data = nemo_batch(batch)
    data["sample_mask"][3] = 0.0
    assert nemo_rl(data)["response_mask"].any(1).tolist() == [row != 3 for row in range(16)]
