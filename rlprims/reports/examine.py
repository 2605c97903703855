"""Print samples during a run."""

import math
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rlprims.data_proto import DataProto
from rlprims.reports._rollout_rows import visible

_INTERNAL = {"sample_id", "group", "group_ids", "trajectory_ids", "ended", "valid_rows", "rm_scores"}


def examine(console: Console, title: str, batches: Iterable[DataProto], count: int) -> None:
    """Print the first ``count`` samples of each data source: prompt, response, answer, and every score."""
    seen: Counter[str] = Counter()
    for batch in batches if count else ():
        numbers = [name for name, column in batch.batch.items() if column.dim() == 1 and name not in _INTERNAL]
        for i, source in enumerate(batch["data_source"]):
            if seen[source] == count:
                continue
            seen[source] += 1
            values = {name: float(batch[name][i]) for name in numbers}
            scores = "  ".join(f"{name} {value:g}" for name, value in values.items() if not math.isnan(value))
            failure = batch["failure"][i]
            console.print(Rule(Text(visible(f"{title} · {source}"), style="bold"), align="left", style="dim"))
            console.print(Text(visible(batch["prompt"][i]), style="dim"))
            console.print(Text(visible(batch["response"][i])))
            console.print(Text(visible(f"answer: {batch['answer'][i]}"), style="dim"))
            console.print(Text(visible(f"{scores}  {failure}" if failure else scores), style="bold"))
