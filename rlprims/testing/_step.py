"""A trainer's step beside an algorithm: for the unit test of a trainer of your own."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.audit import report
from rlprims.audit._found import difference, tensors_of
from rlprims.data_proto import DataProto

_STAGES = {"advantages": ("advantages",), "losses": ("loss",), "loss": ("loss", "mean"), "gradients": ("loss", "mean")}


def assert_step(
    batch: DataProto | Mapping[str, Any], algorithm: Algorithm | str, *, tolerance: float = 1e-5
) -> tuple[str, ...]:
    """Fail unless a step's results are those of the algorithm, and :func:`rlprims.audit.check` finds no error.

    Computes ``advantages``, ``losses``, ``loss`` and ``gradients`` again, those that the batch has, each from the
    batch's own inputs. Advantages without ``scores`` and ``rewards`` are inputs only.

    Args:
        batch: named tensors, padded, as :func:`rlprims.audit.identify` reads them.
        algorithm: an algorithm, the name of a preset, or YAML.
        tolerance: largest difference, relative to the largest number.

    Returns:
        The results that were compared.

    Raises:
        AssertionError: a result differs; the message has the place, and the formula that fits instead.
        ValueError: nothing to compare, or a column is missing.
    """
    __tracebackhide__ = True
    if isinstance(algorithm, str):
        algorithm = PRESETS[algorithm]() if algorithm in PRESETS else Algorithm.from_yaml(algorithm)
    data = {name: x.double() if x.is_floating_point() else x for name, x in tensors_of(batch).items()}
    compared = list[str]()
    for name, expected in _recomputed(algorithm, data):
        compared.append(name)
        width = expected.shape[-1] if expected.dim() else 1
        outside = ~data["response_mask"] if expected.dim() else torch.tensor([[False]])
        got, wanted = (x.detach().reshape(-1, width).masked_fill(outside, 0.0) for x in (data[name], expected))
        if (apart := difference(got, wanted)) > tolerance:
            row, token = divmod(int((got - wanted).abs().argmax()), width)
            place = f" at row {row}, token {token}" if expected.dim() else ""
            numbers = f"got {float(got[row, token]):.6g}, expected {float(wanted[row, token]):.6g}"
            stages = report(batch, tolerance=tolerance).stages
            told = "; ".join(f"{stage}: {stages[stage].said}" for stage in _STAGES[name] if stage in stages)
            part = {"advantages": algorithm.advantage, "losses": algorithm.policy_loss}.get(name, algorithm.aggregation)
            raise AssertionError(f"{name} differ from {part} by {apart:.2%}{place}: {numbers}; audit says {told}")
    if not compared:
        raise ValueError(f"expected advantages with scores or rewards, losses, loss or gradients, got {sorted(data)}")
    if errors := report(batch, tolerance=tolerance).errors:
        raise AssertionError("\n".join(f"{x.code}: {x.message}; {x.consequence}; {x.fix}" for x in errors))
    return tuple(compared)


def _recomputed(spec: Algorithm, data: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each result of the batch, with what the algorithm makes of its inputs."""
    if "advantages" in data and {"scores", "rewards"} & data.keys():
        yield "advantages", _advantages(spec, data)
    if not {"losses", "loss", "gradients"} & data.keys():
        return
    own = {"loss_weights"} & data.keys()
    weights = {name: x for name, x in algorithms.token_weights(spec, data).items() if name not in own}
    log_probs = data["log_probs"].clone().requires_grad_()
    columns = {**data, **weights, "log_probs": log_probs}
    if "losses" in data:
        yield "losses", algorithms.policy_losses(spec, columns)
    objective = algorithms.policy_objective(spec, columns)
    if "loss" in data:
        yield "loss", objective
    if "gradients" in data:
        yield "gradients", torch.autograd.grad(objective, log_probs, materialize_grads=True)[0]


def _advantages(spec: Algorithm, data: Mapping[str, Tensor]) -> Tensor:
    columns, kl_coef = dict(data), 0.0
    if "scores" in data:
        columns |= algorithms.component_scores(spec, data) | (
            {} if "shaped_scores" in data else algorithms.shape_scores(spec, data)
        )
        kl_coef = spec.kl_in_reward.controller.hyperparameters["kl_coef"] if spec.kl_in_reward else 0.0
    else:  # rewards of tokens, which have their KL
        columns |= {"rm_scores": data["rewards"], "shaped_scores": (data["rewards"] * data["response_mask"]).sum(1)}
    estimated = algorithms.estimate_advantages(spec, columns, kl_coef=kl_coef)
    return {**estimated, **algorithms.mask_turns(spec, {**columns, **estimated})}["advantages"]
