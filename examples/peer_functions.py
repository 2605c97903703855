"""Losses and estimators of other trainers under the names of the vocabulary, for their laws.

    rlprims check-loss examples/peer_functions.py:trl_dapo
    rlprims check-advantage examples/peer_functions.py:verl_rloo

Each function calls the trainer's own one, as the trainer does, and gives its first result; its package must be
installed. A loss is a mean, so its result is a number. Add yours: a function whose parameters are names of the
vocabulary, or write ``--arguments`` for one with other names.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _verl_loss(mode: str, mean: str = "token-mean") -> Callable[..., Tensor]:
    """verl's policy loss of this name, by the settings of its actor."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        config = importlib.import_module("verl.workers.config").ActorConfig(
            strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4, loss_agg_mode=mean
        )
        columns = {"old_log_prob": old_log_probs, "log_prob": log_probs, "advantages": advantages}
        mask = response_mask.long()
        return core.get_policy_loss_fn(mode)(**columns, response_mask=mask, loss_agg_mode=mean, config=config)[0]

    return loss


verl_vanilla, verl_gpg, verl_cispo = _verl_loss("vanilla"), _verl_loss("gpg"), _verl_loss("cispo")
verl_gspo, verl_sapo = _verl_loss("gspo", "seq-mean-token-mean"), _verl_loss("sapo", "seq-mean-token-mean")
verl_geo_mean, verl_dppo_tv, verl_clip_cov = _verl_loss("geo_mean"), _verl_loss("dppo_tv"), _verl_loss("clip_cov")


def _verl_estimator(name: str) -> Callable[..., Tensor]:
    """verl's estimator of this name, for scores of responses on their last tokens."""

    def advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        columns = {"token_level_rewards": rewards.clone(), "response_mask": response_mask.long()}
        return core.get_adv_estimator_fn(name)(**columns, index=group_ids.numpy())[0]

    return advantages


verl_grpo, verl_rloo, verl_opo = _verl_estimator("grpo"), _verl_estimator("rloo"), _verl_estimator("opo")
verl_reinforce_plus_plus_baseline = _verl_estimator("reinforce_plus_plus_baseline")
verl_grpo_vectorized, verl_rloo_vectorized = _verl_estimator("grpo_vectorized"), _verl_estimator("rloo_vectorized")


def verl_gae(rewards: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """verl's GAE with gamma 1 and lambda 0.95, whitened."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    return core.compute_gae_advantage_return(rewards, values, response_mask.long(), gamma=1.0, lam=0.95)[0]


def _trl_loss(loss_type: str, **settings: Any) -> Callable[..., Tensor]:
    """``GRPOTrainer._compute_loss`` of one process and one micro-batch, with the log-probs that are given."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        trainer = importlib.import_module("trl").GRPOTrainer
        args = SimpleNamespace(delta=None, steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
        accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
        own = {
            "loss_type": loss_type, "args": args, "accelerator": accelerator, "model": SimpleNamespace(training=True),
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "importance_sampling_level": "token", "beta": 0.0, "use_vllm": False, "epsilon_low": 0.2,
            "epsilon_high": 0.2, "max_completion_length": 256, "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False, "_metrics": {"train": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        }  # fmt: skip
        mask = response_mask.long()
        ids = torch.zeros_like(mask)
        inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
        inputs |= {"advantages": advantages, "old_per_token_logps": old_log_probs, "num_items_in_batch": mask.sum()}
        return trainer._compute_loss(SimpleNamespace(**own | settings), None, inputs)

    return loss


trl_grpo, trl_bnpo, trl_dr_grpo = _trl_loss("grpo"), _trl_loss("bnpo"), _trl_loss("dr_grpo")
trl_dapo, trl_sapo = _trl_loss("dapo", epsilon_high=0.28), _trl_loss("sapo")
trl_cispo, trl_gspo = _trl_loss("cispo", epsilon_high=5.0), _trl_loss("grpo", importance_sampling_level="sequence")


def _liger_loss(loss_type: str) -> Callable[..., Tensor]:
    """The formula of Liger's ``LigerFusedLinearGRPOLoss``, on log-probs; ``scores`` are one advantage per response."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, scores: Tensor, response_mask: Tensor) -> Tensor:
        fused = importlib.import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
        mask = response_mask.long()
        given = {"old_per_token_logps": old_log_probs, "beta": 0.0, "loss_type": loss_type}
        return fused.ppo_loss_fn(log_probs, mask, scores, mask, **given, max_completion_length=256)[0]

    return loss


liger_grpo, liger_dapo, liger_dr_grpo = _liger_loss("grpo"), _liger_loss("dapo"), _liger_loss("dr_grpo")

LOSSES = {
    "verl": "vanilla gspo sapo gpg cispo geo_mean dppo_tv clip_cov",
    "trl": "grpo bnpo dr_grpo dapo gspo cispo sapo",
    "liger": "grpo dapo dr_grpo",
}
ESTIMATORS = {"verl": "grpo grpo_vectorized rloo rloo_vectorized opo reinforce_plus_plus_baseline gae"}
"""The functions above by package, without its name."""
