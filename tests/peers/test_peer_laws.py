"""``examples/peer_functions.py``: each function computes what its trainer does, and the page has its laws."""

import pytest
import torch

from benchmarks.laws import PAGE, SHOWN, peers, row
from examples import peer_functions
from rlprims import losses

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def batch() -> dict[str, torch.Tensor]:
    mask = torch.arange(6) < torch.tensor([6, 2, 5, 3])[:, None]
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 6, generator=generator)
    names = {"log_probs": old + torch.randn(4, 6, generator=generator) / 3, "old_log_probs": old}
    return {**names, "advantages": torch.randn(4, 6, generator=generator), "response_mask": mask}


FORMULAS = {
    "verl_vanilla": (losses.clipped_surrogate, {"dual_clip": 3.0}, losses.token_mean),
    "trl_grpo": (losses.clipped_surrogate, {}, losses.seq_mean_token_mean),
    "trl_dapo": (losses.clipped_surrogate, {"clip_high": 0.28}, losses.token_mean),
    "trl_gspo": (losses.gspo, {"clip_low": 0.2, "clip_high": 0.2}, losses.seq_mean_token_mean),
    "liger_dapo": (losses.clipped_surrogate, {}, losses.token_mean),
    "verl_sapo": (losses.sapo, {}, losses.seq_mean_token_mean),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_the_formula_of_its_name(name: str) -> None:
    formula, settings, mean = FORMULAS[name]
    data = batch()
    if name.startswith("liger"):  # one advantage per response
        data["advantages"] = data["advantages"][:, :1].expand(4, 6)
    expected = mean(formula(**data, **settings), data["response_mask"])
    if name.startswith("liger"):
        data["scores"] = data.pop("advantages")[:, 0]
    torch.testing.assert_close(getattr(peer_functions, name)(**data), expected, rtol=1e-5, atol=1e-6)


def test_the_page_has_the_laws_of_today() -> None:
    page, programs, known = PAGE.read_text(), {}, {peer.name: peer for peer in peers()}
    for name in ("verl_vanilla", "verl_cispo", "trl_dapo"):
        assert row(known[name.split("_")[0]], name, "loss", programs) in page
    assert row(known["verl"], "verl_rloo", "advantage", programs) in page
    assert ("verl_vanilla", "masked is absent") in programs
    assert all(f"breaks the law that {law}" in page for _, law in SHOWN)
