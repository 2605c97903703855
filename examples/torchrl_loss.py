"""Loss modules for torchrl, 0.10 to 0.14: the loss of an algorithm, with torchrl's policies, keys and masks.

Copy this file beside your script: ``from torchrl_loss import grpo_loss``. The import needs no torchrl.
"""

import importlib
from typing import Any, Literal

import torch

from rlprims.algorithms import Algorithm, policy_objective, token_weights
from rlprims.diagnostics import ratio_stats

READABLE = frozenset(
    {"log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropies", "advantages", "response_mask"}
    | {"losses", "totals"}
)
"""What a loss can read: torchrl has no groups and no critic there."""


def grpo_loss(algorithm: Algorithm, base: Any = None) -> Any:
    """``torchrl.objectives.llm.GRPOLoss``, or your subclass of it, with the loss of ``algorithm``.

    ``GRPOLoss = grpo_loss(algorithms.dapo())`` is the only line to change. An instance is a ``LossModule``, made from a
    policy, a ``masking_strategy`` and a ``device``. Its keys are torchrl's; ``set_keys`` renames them:

    ============================================  =====================================================
    ``("log_probs", "full")``                     ``rollout_log_probs``, which are also ``old_log_probs``
    ``"advantage"``                               ``advantages``, with a last dimension of 1
    ``("next", "ref_log_probs", "full")``         ``ref_log_probs``, if the algorithm reads them
    the mask of the policy's distribution         ``response_mask``
    ============================================  =====================================================

    ``loss_objective`` includes all loss terms of the algorithm. Denominators are counted in the given tensordict.
    Estimate advantages before the replay buffer, while groups are whole: torchrl has ``MCAdvantage``.

    Raises:
        ImportError: torchrl is not installed.
        ValueError: the loss needs data that a torchrl tensordict does not have.
    """
    needs = algorithm.loss_needs | algorithm.token_weight_needs | {term.mask for term in algorithm.loss_terms}
    if lacking := sorted(needs.union(*(mean.needs for mean in algorithm.aggregations)) - READABLE):
        raise ValueError(f"torchrl does not have {', '.join(lacking)} for the loss of {algorithm.name}")
    return type("GRPOLoss", (_Hooks, base or _torchrl().GRPOLoss), {"algorithm": algorithm})


class _Hooks:
    """Methods that override those of torchrl's class; this class is first in the method resolution order."""

    algorithm: Algorithm

    def __init__(
        self,
        actor_network: Any = None,
        *,
        masking_strategy: Literal["sft", "rlhf", "generic"] = "sft",
        device: torch.device | None = None,
    ) -> None:
        module: Any = super()
        module.__init__(actor_network, masking_strategy=masking_strategy, device=device, entropy_bonus=False)

    def forward(self, tensordict: Any) -> Any:
        module: Any = self
        keys, algorithm = module.tensor_keys, self.algorithm
        log_probs, dist, _ = module._get_cur_log_prob(tensordict.copy())
        sampled = _tokens(tensordict, keys.sample_log_prob, log_probs.dim())
        mask = dist.mask & sampled.isfinite()  # torchrl has NaN on tokens that were not sampled
        data = {
            "log_probs": log_probs,
            "old_log_probs": sampled,
            "rollout_log_probs": sampled,
            "advantages": _tokens(tensordict, keys.advantage, log_probs.dim()),
            "response_mask": mask,
            "totals": None,
        }
        if "ref_log_probs" in algorithm.needs:
            data["ref_log_probs"] = _tokens(tensordict, keys.ref_log_probs, log_probs.dim())
        if "entropies" in algorithm.needs:
            data["entropies"] = dist.entropy()
        objective = policy_objective(algorithm, data | token_weights(algorithm, data))
        bounds = {name: algorithm.policy_loss.hyperparameters.get(name) for name in ("clip_low", "clip_high")}
        metrics = ratio_stats(log_probs, sampled, data["advantages"], mask, **bounds)
        clipped = [metrics[name].value() for name in ("clip_fraction_low", "clip_fraction_high") if name in metrics]
        log_weights = torch.where(mask, log_probs.detach() - sampled, -torch.inf).flatten()
        effective_size = (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp()
        return _torchrl().GRPOLossOutput(
            loss_objective=objective,
            clip_fraction=torch.stack(clipped).sum() if clipped else objective.new_zeros(()),
            kl_approx=metrics["approx_kl"].value(),
            ESS=effective_size / mask.sum(),
            entropy=data["entropies"].detach()[mask].mean() if "entropies" in data else None,
            batch_size=[],
        )


def _tokens(tensordict: Any, key: Any, dims: int) -> Any:
    """The values per token, padded on the left as in torchrl."""
    values = tensordict.get(key, None, as_padded_tensor=True, padding_side="left", padding_value=0.0)
    if values is None:
        raise ValueError(f"the tensordict has no {key}; it has {sorted(map(str, tensordict.keys(True)))}")
    return values.squeeze(-1) if values.dim() > dims else values


def _torchrl() -> Any:
    return importlib.import_module("torchrl.objectives.llm")
