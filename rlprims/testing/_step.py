"""A trainer's step beside an algorithm: for the unit test of a trainer of your own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.audit import check, report
from rlprims.audit._found import difference, tensors_of
from rlprims.data_proto import DataProto


def assert_step(
    batch: DataProto | Mapping[str, Any], algorithm: Algorithm | str, *, tolerance: float = 1e-5
) -> tuple[str, ...]:
    """Fail unless a step's results are those of the algorithm, and :func:`rlprims.audit.check` finds no error.

    ``advantages``, ``losses``, ``loss`` and ``gradients``, those that the batch has, are computed again from its own
    inputs. Advantages without ``scores`` and ``rewards`` are inputs only.

    Returns the names of what was compared. ``algorithm`` may be the name of a preset, or YAML.

    Raises:
        AssertionError: a result differs; the message has the place, and the formulas that fit instead.
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
            formulas = ", ".join(f"{stage} {found.said}" for stage, found in stages.items())
            part = {"advantages": algorithm.advantage, "losses": algorithm.policy_loss}.get(name, algorithm.aggregation)
            raise AssertionError(f"{name}, expected {part}, differ by {apart:.2%}{place}: {numbers}; it has {formulas}")
    if not expected:
        raise ValueError(f"expected advantages with scores or rewards, losses, loss or gradients, got {sorted(data)}")
    if (found := check(batch)).findings and found.findings[0].severity == "error":  # errors come first
        raise AssertionError(str(found))
    return tuple(expected)


def _recomputed(spec: Algorithm, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results that the batch has, as the algorithm makes them of its inputs."""
    results, columns = {}, dict(data)
    if "advantages" in data and {"scores", "rewards"} & data.keys():
        kl_coef = spec.kl_in_reward.controller.hyperparameters["kl_coef"] if spec.kl_in_reward else 0.0
        if "scores" in data:
            columns = {**algorithms.shape_scores(spec, data), **data, **algorithms.component_scores(spec, data)}
        else:  # rewards of tokens, which have their KL
            total = data["rewards"].where(data["response_mask"], 0.0).sum(1)
            columns, kl_coef = {**data, "rm_scores": data["rewards"], "shaped_scores": total}, 0.0
        columns |= algorithms.estimate_advantages(spec, columns, kl_coef=kl_coef)
        results["advantages"] = {**columns, **algorithms.mask_turns(spec, columns)}["advantages"]
    if {"losses", "loss", "gradients"} & data.keys():
        log_probs = data["log_probs"].clone().requires_grad_()
        columns = {**algorithms.token_weights(spec, data), **data, "log_probs": log_probs}
        results["losses"] = algorithms.policy_losses(spec, columns)
        results["loss"] = algorithms.policy_objective(spec, columns)
        (results["gradients"],) = torch.autograd.grad(results["loss"] + 0 * log_probs.sum(), log_probs)
    return {name: x for name, x in results.items() if name in data}
