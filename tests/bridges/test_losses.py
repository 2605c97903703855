"""The losses of docs/interop.md with the real packages that install without a GPU."""

from typing import Any

import pytest
import torch

from tests.interop.test_hooks import check_tinker, check_torchtitan, given

pytestmark = pytest.mark.bridges


def test_tinker() -> None:
    """tinker's client calls the loss and sends the server −dL/dlogprob of each token as its weight."""
    tinker = pytest.importorskip("tinker")
    from tinker.lib.public_interfaces.training_client import TrainingClient

    def datum(**inputs: Any) -> Any:
        length = len(inputs["target_tokens"].to_torch())
        return tinker.Datum(model_input=tinker.ModelInput.from_ints([1] * length), loss_fn_inputs=inputs)

    loss = given("tinker")["loss"]
    check_tinker(loss, datum, tinker.TensorData.from_torch)
    data = [
        datum(**{name: tinker.TensorData.from_torch(x) for name, x in each.items()})
        for each in (
            {"target_tokens": torch.tensor([3]), "logprobs": torch.tensor([-1.0]), "mask": torch.tensor([1.0])}
            | {"advantages": torch.tensor([advantage])}
            for advantage in (1.0, -3.0)
        )
    ]
    outputs = [{"logprobs": tinker.TensorData.from_torch(torch.tensor([-1.0]))} for _ in data]
    forward = tinker.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=outputs, metrics={})
    result = TrainingClient._compute_custom_loss(data, loss, forward)
    assert [each.loss_fn_inputs["weights"].tolist() for each in result.data] == [[0.5], [-1.5]]


def test_torchtitan() -> None:
    """The trainer builds the loss from its config; the tokens of 0.3.0 are (B, L)."""
    pytest.importorskip("torchtitan.components.loss")
    block = given("torchtitan")["CISPO"]
    check_torchtitan(block.Config(w_max=1.5).build(), lambda x: x[None])
