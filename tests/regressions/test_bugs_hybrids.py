"""Models whose layers keep states of all that they have read."""

from pathlib import Path

import torch

from rlprims import algorithms
from rlprims.execution import Sampling
from tests.execution.execution_contract import local, prompts
from tests.hybrids import alone, save_hybrid


def test_h1_ms_swift_9565_a_row_of_linear_attention_has_no_state_of_its_neighbour(tmp_path: Path) -> None:
    """ms-swift#9565: Qwen3.5 packed: positions begin anew, and the state goes on from the row before."""
    execution = local(save_hybrid(tmp_path, "qwen3_5_text"), algorithms.reinforce(), packing=False)
    model = execution.training.policy.module
    batch = execution.generate(prompts(["1+2=", "7"]), Sampling(max_new_tokens=6), seed=0, prompt_width=4)
    expected = alone(model, batch)
    torch.testing.assert_close(execution.log_probs(batch), expected, rtol=1e-5, atol=1e-5)

    rows, attended = torch.cat([batch["prompts"], batch["responses"]], 1), batch["attention_mask"].bool()
    ids = [row[keep] for row, keep in zip(rows, attended, strict=True)]
    positions = torch.cat([torch.arange(len(row)) for row in ids])
    with torch.no_grad():
        scores = model(input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False).logits[0]
    length = int(batch["response_mask"][1].sum())
    peer = scores[-length - 1 : -1].float().log_softmax(-1).gather(-1, ids[1][-length:, None])[:, 0]
    assert (peer - expected[1, :length]).abs().max() > 0.01
