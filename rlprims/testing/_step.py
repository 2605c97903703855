"""A trainer's step beside an algorithm: for the unit test of a trainer of your own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.audit import report
from rlprims.audit._found import difference, tensors_of
from rlprims.data_proto import DataProto


def assert_step(
    batch: DataProto | Mapping[str, Any], algorithm: Algorithm | str, *, tolerance: float = 1e-5
) -> tuple[str, ...]:
    """Fail unless a step's results are those of the algorithm, and :func:`rlprims.audit.check` finds no error.

    ``advantages``, ``losses``, ``loss`` and ``gradients``, those that the batch has, are computed again from its own
    inputs. Advantages without ``scores`` and ``rewards`` are inputs only.

    Args:
        batch: named tensors, padded, as :func:`rlprims.audit.identify` reads them.
        algorithm: an algorithm, the name of a preset, or YAML.
        tolerance: largest difference, relative to the largest number.

    Returns:
        The names of the results that were compared.

    Raises:
        AssertionError: a result differs; the message has the place, and the formula that fits instead.
        ValueError: nothing to compare, or a column is missing.
    """
    __tracebackhide__ = True
    if isinstance(algorithm, str):
        algorithm = PRESETS[algorithm]() if algorithm in PRESETS else Algorithm.from_yaml(algorithm)
    data = {name: x.double() if x.is_floating_point() else x for name, x in tensors_of(batch).items()}
    expected = _recomputed(algorithm, data)
    for name, result in expected.items():
        got, wanted = (x.detach().where(data["response_mask"] | (x.dim() == 0), 0.0) for x in (data[name], result))
        if (apart := difference(got, wanted)) > tolerance:
            row, token = divmod(int((got - wanted).abs().argmax()), got.shape[1])
            place = f" at row {row}, token {token}" * (result.dim() > 0)
            numbers = f"got {float(got[row, token]):.6g}, expected {float(wanted[row, token]):.6g}"
            stages = report(batch, tolerance=tolerance).identified.stages
            told = ", ".join(f"{stage} {found.said}" for stage, found in stages.items())
            part = {"advantages": algorithm.advantage, "losses": algorithm.policy_loss}.get(name, algorithm.aggregation)
            raise AssertionError(f"{name}, expected {part}, differ by {apart:.2%}{place}: {numbers}; it has {told}")
    if not expected:
        raise ValueError(f"expected advantages with scores or rewards, losses, loss or gradients, got {sorted(data)}")
    if errors := report(batch, tolerance=tolerance).errors:
        raise AssertionError("\n".join(f"{x.code}: {x.message}; {x.consequence}; {x.fix}" for x in errors))
    return tuple(expected)


def _recomputed(spec: Algorithm, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results that the batch has, as the algorithm makes them of its inputs."""
    results = {}
    if "advantages" in data and {"scores", "rewards"} & data.keys():
        results["advantages"] = _advantages(spec, data)
    if {"losses", "loss", "gradients"} & data.keys():
        log_probs = data["log_probs"].clone().requires_grad_()
        columns = {**algorithms.token_weights(spec, data), **data, "log_probs": log_probs}
        results |= {"losses": algorithms.policy_losses(spec, columns)}
        results["loss"] = algorithms.policy_objective(spec, columns)
        (results["gradients"],) = torch.autograd.grad(results["loss"] + 0 * log_probs.sum(), log_probs)
    return {name: x for name, x in results.items() if name in data}


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
