"""From the numbers of any trainer's step to the formulas that made them.

>>> import torch
>>> from rlprims import audit
>>> scores, group_ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
>>> mask = torch.ones(6, 2, dtype=torch.bool)
>>> centred = scores - torch.tensor([1 / 3, 2 / 3]).repeat_interleave(3)
>>> advantages = (centred / (2 / 9) ** 0.5)[:, None].expand(6, 2)
>>> batch = {"scores": scores, "group_ids": group_ids, "response_mask": mask, "advantages": advantages}
>>> audit.identify(batch)["advantages"].said
'advantage.grpo(ddof=0)'
"""

from rlprims.audit._checks import CHECKS, check
from rlprims.audit._finding import Checked, Finding
from rlprims.audit._found import Found
from rlprims.audit._identify import Identified, identify
from rlprims.audit._report import Report, report

__all__ = ["CHECKS", "Checked", "Finding", "Found", "Identified", "Report", "check", "identify", "report"]
