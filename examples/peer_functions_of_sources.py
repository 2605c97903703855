"""Losses and estimators of trainers that are not installed, from checkouts of their sources; see peer_functions.py.

    PEER_SOURCES=~/sources rlprims check-loss examples/peer_functions_of_sources.py:skyrl_gspo

The folder has the repositories of ``CHECKOUTS`` under these names. Of a trainer's file only the definitions run that a
function reads, without its annotations and without decorators that register, compile or check types: these change no
number. What could change one is not replaced: a name that cannot be imported is missing, and the function raises.
"""

import ast
import importlib
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CHECKOUTS = {
    "AReaL": ("inclusionAI/AReaL", "4aef98d8d818af55b43621aaadba047ae10f4e77"),
    "NeMo-RL": ("NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909"),
    "OpenRLHF": ("OpenRLHF/OpenRLHF", "3c3be6234e0cb353e76bb8019947db9dfe99fca7"),
    "open-instruct": ("allenai/open-instruct", "e6c3044aa6201c8bfa4573c1b03142af599e730d"),
    "prime-rl": ("PrimeIntellect-ai/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64"),
    "ROLL": ("alibaba/ROLL", "8eb27cc2dc34c4d1310b169d9b86d339004d811a"),
    "SkyRL": ("NovaSky-AI/SkyRL", "a9564572eb8e91076be43c1bd5e4615e3de17265"),
    "slime": ("THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515"),
    "torchtune": ("pytorch/torchtune", "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1"),
    "unsloth-zoo": ("unslothai/unsloth-zoo", "ce232d6cef9cb8cd34cd3727906131622177436b"),
}
"""The repositories by the names of their checkouts, with the commits at which the page was made."""

LEFT_OUT = ("jaxtyped", "register_advantage_estimator", "register_policy_loss", "torch.compile")
"""The decorators of functions that change no number."""

QUIET = logging.getLogger("peers")
"""What a trainer logs is no number; its own loggers create folders."""
QUIET.disabled = True


class _Bare(ast.NodeTransformer):
    """A definition without annotations, and without the decorators that are left out."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        decorators = [x for x in node.decorator_list if not ast.unparse(x).startswith(LEFT_OUT)]
        node.returns, node.decorator_list = None, decorators
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


class _File:
    """A file of a checkout as a module, of which a definition runs when its name is first read."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path, self._names = root, path, {"__name__": path.stem, "logger": QUIET}
        tree = _Bare().visit(ast.parse(path.read_text()))
        self._waiting = {name: statement for statement in tree.body for name in _defined(statement) - {"logger"}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self._read(name):
            raise AttributeError(f"{self._path} has no {name}")
        return self._names[name]

    def _read(self, name: str) -> bool:
        """Whether it has this name; its definition runs, after those that it reads."""
        statement = self._waiting.pop(name, None)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(statement, name)
        elif statement:
            for used in ast.walk(statement):
                if isinstance(used, ast.Name):
                    self._read(used.id)
            body = ast.fix_missing_locations(ast.Module([statement], []))
            exec(compile(body, str(self._path), "exec", dont_inherit=True), self._names)
        return name in self._names

    def _import(self, statement: ast.Import | ast.ImportFrom, name: str) -> None:
        """The name, from another file of the checkout or from a package; nothing without the package."""
        module, own = next((x.name, x.name) for x in statement.names if name in (x.asname, x.name.split(".")[0]))
        if isinstance(statement, ast.ImportFrom):
            parents = [*self._path.relative_to(self._root).parts][: -statement.level] if statement.level else []
            module = ".".join([*parents, *([statement.module] if statement.module else [])])
        try:
            found = _module(self._root, module)
            if isinstance(statement, ast.Import):
                is_first = not any(x.asname == name for x in statement.names)
                self._names[name] = _module(self._root, name) if is_first else found
            else:
                inner = _path(self._root, f"{module}.{own}")
                self._names[name] = _file(self._root, inner) if inner else getattr(found, own)
        except ImportError:
            pass


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a file defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {x.asname or x.name.split(".")[0] for x in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _path(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    found = [x for x in (path.with_name(f"{path.name}.py"), path / "__init__.py") if x.is_file()]
    return found[0] if found else None


def _module(root: Path, module: str) -> Any:
    path = _path(root, module)
    return _file(root, path) if path else importlib.import_module(module)


@cache
def _file(root: Path, path: Path) -> _File:
    return _File(root, path)


def sources(checkout: str) -> Path | None:
    """The folder of a checkout, if it is there."""
    folder = Path(os.environ.get("PEER_SOURCES", "")).expanduser() / checkout
    return folder if os.environ.get("PEER_SOURCES") and folder.is_dir() else None


def own(checkout: str, module: str, under: str = "") -> Any:
    """A trainer's module, from its checkout."""
    folder = sources(checkout)
    if folder is None:
        where = "https://github.com/" + CHECKOUTS[checkout][0]
        raise ValueError(f"PEER_SOURCES: expected a folder with {checkout}, a checkout of {where}")
    return _module(folder / under, module)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def _openrlhf(kind: str) -> Loss:
    """OpenRLHF's ``PolicyLoss`` of one process, with its defaults."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        policy_loss = own("OpenRLHF", "openrlhf.models.loss").PolicyLoss(policy_loss_type=kind)
        counts = own("OpenRLHF", "openrlhf.utils.loss_utils").get_loss_batch_info(None, response_mask)
        return policy_loss(log_probs, old_log_probs, advantages, response_mask, **counts)[0]

    return loss


openrlhf_ppo, openrlhf_gspo = _openrlhf("ppo"), _openrlhf("gspo")


def _skyrl(name: str, **settings: Any) -> Loss:
    """SkyRL's policy loss of this name, a sum over tokens; ``settings`` are its defaults."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        function = getattr(own("SkyRL", "skyrl.backends.skyrl_train.utils.ppo_utils"), name)
        usual = {"eps_clip_low": 0.2, "eps_clip_high": 0.2, "off_policy_correction": None}
        config = SimpleNamespace(**usual, **settings, loss_reduction="sequence_mean")
        return function(log_probs, old_log_probs, advantages, config, response_mask.long())[0]

    return loss


skyrl_ppo = _skyrl("ppo_policy_loss", policy_loss_type="regular")
skyrl_gspo = _skyrl("gspo_policy_loss")
skyrl_sapo = _skyrl("sapo_policy_loss", sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05))
skyrl_cispo = _skyrl(
    "compute_policy_loss_cispo",
    cispo=SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
)
skyrl_dppo = _skyrl("dppo_policy_loss", dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2))


def _skyrl_estimator(name: str) -> Estimator:
    """SkyRL's estimator of this name, for scores of responses on their last tokens."""

    def advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
        function = getattr(own("SkyRL", "skyrl.backends.skyrl_train.utils.ppo_utils"), name)
        return function(rewards, response_mask.long(), index=group_ids.numpy())[0]

    return advantages


skyrl_grpo_advantage = _skyrl_estimator("compute_grpo_outcome_advantage")
skyrl_maxrl_advantage = _skyrl_estimator("compute_maxrl_advantage")


def skyrl_gae(rewards: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """SkyRL's GAE with gamma 1 and lambda 0.95, whitened."""
    function = own("SkyRL", "skyrl.backends.skyrl_train.utils.ppo_utils").compute_gae_advantage_return
    return function(rewards, values, response_mask.long(), gamma=1.0, lambd=0.95)[0]


def _nemo_rl(**settings: Any) -> Loss:
    """NeMo-RL's ``ClippedPGLossFn`` without the KL, for one micro-batch that is the whole batch."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        module = own("NeMo-RL", "nemo_rl.algorithms.loss.loss_functions")
        config = module.ClippedPGLossConfig.model_construct(reference_policy_kl_penalty=0.0, **settings)
        shifted = {"advantages": advantages, "prev_logprobs": old_log_probs, "generation_logprobs": old_log_probs}
        data = {name: pad(x, (1, 0)) for name, x in shifted.items()}  # the function leaves out the first column
        data |= {"token_mask": pad(response_mask.float(), (1, 0)), "sample_mask": torch.ones(len(log_probs))}
        return module.ClippedPGLossFn(config)(log_probs, data, data["sample_mask"].sum(), data["token_mask"].sum())[0]

    return loss


nemo_rl_grpo, nemo_rl_cispo = _nemo_rl(), _nemo_rl(use_cispo=True)
nemo_rl_gspo = _nemo_rl(sequence_level_importance_ratios=True, token_level_loss=False)


def _nemo_rl_estimator(name: str) -> Estimator:
    """NeMo-RL's estimator of this name, for the sums of rewards; its loss masks the advantages, so this does too."""

    def advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
        module = own("NeMo-RL", "nemo_rl.algorithms.advantage_estimator")
        of_loss = own("NeMo-RL", "nemo_rl.algorithms.loss.loss_functions").ClippedPGLossConfig.model_construct()
        estimator = getattr(module, name)(module.AdvEstimatorConfig.model_construct(), of_loss)
        dtype, before = torch.promote_types(rewards.dtype, torch.float32), torch.get_default_dtype()
        scores = torch.where(response_mask, rewards, 0).to(dtype).sum(-1)
        torch.set_default_dtype(dtype)  # it multiplies the rewards by a matrix of this dtype
        try:
            found = estimator.compute_advantage(group_ids[:, None], scores, response_mask.to(dtype))
        finally:
            torch.set_default_dtype(before)
        return torch.where(response_mask, found, 0)

    return advantages


nemo_rl_grpo_advantage = _nemo_rl_estimator("GRPOAdvantageEstimator")
nemo_rl_reinforce_plus_plus = _nemo_rl_estimator("ReinforcePlusPlusAdvantageEstimator")


def _slime(kind: str) -> Loss:
    """slime's policy loss of this kind on packed tokens, a sum of means over samples, of one rank."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        module, lengths = own("slime", "slime.utils.ppo_utils"), [log_probs.shape[1]] * len(log_probs)
        masks, given = list(response_mask.float()), advantages.flatten()
        log_ratios = (old_log_probs - log_probs).flatten()
        if kind == "gspo":
            log_ratios = module.compute_gspo_kl(list(log_probs), list(old_log_probs), list(log_probs), masks)
        if kind == "cispo":
            losses = module.compute_cispo_loss(log_ratios, log_probs.flatten(), given, 0.2, 0.28)[0]
        else:
            losses = module.compute_policy_loss(log_ratios, given, 0.2, 0.28)[0]
        reducers = own("slime", "slime.backends.megatron_utils.cp_utils")
        # Megatron says here how many ranks share a sequence: one
        reducers._names["mpu"] = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
        return reducers.get_sum_of_sample_mean(lengths, lengths, masks)(losses)

    return loss


slime_ppo, slime_gspo, slime_cispo = _slime("ppo"), _slime("gspo"), _slime("cispo")


def _prime_rl(name: str, **settings: float) -> Loss:
    """prime-rl's ``compute_loss`` with its loss of this name, for one micro-batch that is the whole batch."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        module, config = own("prime-rl", "prime_rl.trainer.rl.loss", "src"), SimpleNamespace(**settings)
        of_row, tokens = partial(getattr(module, name), loss_config=config), max(int(response_mask.sum()), 1)
        scales = {"rl_scale": tokens, "ce_scale": 1, "ref_kl_scale": 1}
        given = scales | dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"))
        rows = {"advantages": list(advantages), "loss_mask": list(response_mask)}
        return module.compute_loss(list(log_probs), list(old_log_probs), **rows, **given, rl_loss_fn=of_row)[0]

    return loss


prime_rl_default = _prime_rl("default_loss_fn", dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)
prime_rl_ipo = _prime_rl("ipo_loss_fn", ipo_threshold=0.1, adv_tau=1.0, kl_tau=1e-3)


def _areal(level: str) -> Loss:
    """AReaL's actor loss with the ratios of tokens or of sequences."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        function = own("AReaL", "areal.utils.functional.functional").ppo_actor_loss_fn
        given = {"eps_clip": 0.2, "loss_mask": response_mask, "importance_sampling_level": level}
        return function(log_probs, old_log_probs, old_log_probs, advantages, **given)[0]

    return loss


areal_ppo, areal_gspo = _areal("token"), _areal("sequence")


def areal_sapo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """AReaL's SAPO with the temperatures of its defaults."""
    function = own("AReaL", "areal.utils.functional.functional").sapo_loss_fn
    return function(log_probs, old_log_probs, advantages, 1.0, 1.05, response_mask)[0]


def roll_reinforce(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """ROLL's returns with gamma 1."""
    return _roll("reinforce", response_mask, token_level_rewards=rewards)


def roll_gae(rewards: Tensor, values: Tensor, response_mask: Tensor) -> Tensor:
    """ROLL's GAE with gamma 1 and lambda 0.95."""
    return _roll("gae", response_mask, token_level_rewards=rewards, values=values)


def _roll(kind: str, response_mask: Tensor, **columns: Tensor) -> Tensor:
    module, data = own("ROLL", "roll.utils.functionals"), SimpleNamespace(batch=columns, meta_info={})
    module.compute_advantage(data, 1.0, 0.95, kind, response_mask=response_mask.long())
    return columns["advantages"]


def _torchtune(name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """torchtune's GRPO loss of this name without the KL; ``scores`` are one advantage per response."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, scores: Tensor, response_mask: Tensor) -> Tensor:
        grpo = getattr(own("torchtune", "torchtune.dev.grpo.loss"), name)(epsilon=0.2, kl_coeff=0.0)
        return grpo(old_log_probs, log_probs, log_probs.detach(), scores, response_mask)[0]

    return loss


torchtune_grpo, torchtune_grpo_simple = _torchtune("GRPOLoss"), _torchtune("GRPOSimpleLoss")


def _unsloth(**settings: Any) -> Loss:
    """Unsloth's ``grpo_compute_loss`` without the KL."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        function, mask = own("unsloth-zoo", "unsloth_zoo.rl_replacements").grpo_compute_loss, response_mask.long()
        given = {"num_items_in_batch": mask.sum(), "max_completion_length": 256} | settings
        return function(None, log_probs, old_log_probs, None, mask, mask, 0.0, advantages, **given)[0]

    return loss


unsloth_grpo, unsloth_bnpo, unsloth_dapo = _unsloth(), _unsloth(loss_type="bnpo"), _unsloth(loss_type="dapo")
unsloth_cispo, unsloth_sapo = _unsloth(loss_type="cispo", epsilon_high=5.0), _unsloth(loss_type="sapo")
unsloth_gspo = _unsloth(importance_sampling_level="sequence")


def _open_instruct(kind: str) -> Loss:
    """open-instruct's loss of this kind without the KL, by its mean over tokens."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        module, mean = own("open-instruct", "open_instruct.grpo_utils"), own("open-instruct", "open_instruct.rl_utils")
        config = SimpleNamespace(loss_fn=module.GRPOLossType(kind), clip_lower=0.2, clip_higher=0.28)
        ratio = torch.exp(log_probs - old_log_probs)
        losses = module.compute_grpo_loss(log_probs, ratio, advantages, None, config, torch.ones_like(ratio))[0]
        return mean.masked_mean(losses, response_mask, None, float(response_mask.sum()))

    return loss


open_instruct_dapo, open_instruct_cispo = _open_instruct("dapo"), _open_instruct("cispo")

LOSSES = {
    "AReaL": "areal_ppo areal_gspo areal_sapo",
    "NeMo-RL": "nemo_rl_grpo nemo_rl_gspo nemo_rl_cispo",
    "OpenRLHF": "openrlhf_ppo openrlhf_gspo",
    "SkyRL": "skyrl_ppo skyrl_gspo skyrl_sapo skyrl_cispo skyrl_dppo",
    "open-instruct": "open_instruct_dapo open_instruct_cispo",
    "prime-rl": "prime_rl_default prime_rl_ipo",
    "slime": "slime_ppo slime_gspo slime_cispo",
    "torchtune": "torchtune_grpo torchtune_grpo_simple",
    "unsloth-zoo": "unsloth_grpo unsloth_bnpo unsloth_dapo unsloth_gspo unsloth_cispo unsloth_sapo",
}
ESTIMATORS = {
    "NeMo-RL": "nemo_rl_grpo_advantage nemo_rl_reinforce_plus_plus",
    "ROLL": "roll_reinforce roll_gae",
    "SkyRL": "skyrl_grpo_advantage skyrl_maxrl_advantage skyrl_gae",
}
"""The functions above by checkout."""
