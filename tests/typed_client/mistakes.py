"""What a type checker must catch: every line that says so, and no other. See ``tests/test_release.py``."""

import torch

from rlprims import DataProto, advantage, algorithms, filters, losses, rewards
from rlprims.execution import Execution, Sampling
from rlprims.types import Mean

x = torch.zeros(2, 3)
mask = torch.ones(2, 3, dtype=torch.bool)
ids = torch.tensor([0, 0])

advantage.grpo(x, ids)  # wrong: no mask
advantage.grpo([[0.0]], ids, mask)  # wrong: a list for a tensor
advantage.gae(x, x, mask, None, 0.99)  # wrong: a hyperparameter by position
losses.clipped_surrogate(x, x, x, mask, clip_low="0.2")  # wrong: text for a number
losses.clipped_surrogate(x, x, x, mask, cliphigh=0.28)  # wrong: no such hyperparameter
losses.kl(x, x, mask, value="k4")  # wrong: no such estimator
losses.token_mean(x, mask, totals=6)  # wrong: a number for the totals
length: int = rewards.at_last_token(x[:, 0], mask)  # wrong: it gives a tensor
kept: list[bool] = filters.varied_scores(x[:, 0], ids)  # wrong: it gives a tensor
algorithms.use(3)  # wrong: neither a function nor its path
algorithms.grpo(dialect="trl-9")  # wrong: no such dialect
DataProto.from_dict(torch.zeros(2))  # wrong: a tensor for a mapping
DataProto.concat(DataProto())  # wrong: one batch for several
Mean(x.sum())  # wrong: no count
Sampling(max_new_tokens="many")  # wrong: text for a number


class Sampler:
    """Not an execution: it only samples."""

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        return prompts


execution: Execution = Sampler()  # wrong: the other verbs are missing
