"""Push a checkpoint's model to the Hugging Face hub, with a card that says what was trained on what, and how.

``python examples/push.py runs/gsm8k-dapo YOUR_NAME/NAME --private --checkpoint best`` uses your token (``hf auth
login``). Of paths on this machine the card has only the last names. ``--dry-run`` writes RUN/hub and prints the card.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from rlprims.reports.curves import draw_curves, read_metrics

CARD = """\
---
{metadata}
---

# {name}

{base}, trained on {rows} by {algorithm}: step {step} of a run of rlprims.

```python
from transformers import {auto}, AutoTokenizer

model, tokenizer = {auto}.from_pretrained("{repo}"), AutoTokenizer.from_pretrained("{repo}")
```

## Metrics

{metrics}

{curves}

## Settings

```yaml
{settings}```

Versions: {versions}.
"""

_METRIC = re.compile(r"(.*/)?(acc|accuracy|score|nll|loss|length|entropy|ref_kl|grad_norm)|.*@.*")
"""Those that a card has."""
_SETTING = re.compile("verifier|seed|steps|epochs|.*_per_step|optimizer|algorithm|loss")


def write_card(run: Path, step: int, folder: Path, repo: str) -> str:
    """Write README.md, and curves.png if matplotlib is there, beside an exported model; returns the card.

    Of paths on this machine it has only the last names.
    """
    from huggingface_hub import ModelCardData, try_to_load_from_cache

    config = yaml.safe_load((run / "config.yaml").read_text())
    base, rows = config["model"]["path"].removeprefix("hf://"), config["data"]["train"]
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None
    is_of_hub = is_name and (base != config["model"]["path"] or bool(try_to_load_from_cache(base, "config.json")))
    data_set = re.match("hf://datasets/([^/@]+/[^/@]+)", rows)
    is_reward = json.loads((folder / "config.json").read_text())["architectures"][0].endswith("SequenceClassification")
    stages = config.get("algorithm", config.get("loss"))
    algorithm = re.split("[.:]", stages if isinstance(stages, str) else stages.get("name") or stages["fn"])[-1]
    metadata = ModelCardData(
        base_model=base if is_of_hub else None,
        datasets=[data_set[1]] if data_set else None,
        library_name="transformers",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=["rlprims", algorithm],
    )
    curves = ""
    with suppress(ModuleNotFoundError):
        curves = f"![curves]({draw_curves([run], folder / 'curves.png').name})"
    if isinstance(config.get("verifier"), dict):
        config["verifier"] = config["verifier"]["fn"]  # its arguments may have secrets
    settings = yaml.safe_dump({key: value for key, value in config.items() if _SETTING.fullmatch(key)}, sort_keys=False)
    packages = json.loads((run / "environment.json").read_text())["packages"]
    card = CARD.format(
        metadata=metadata.to_yaml(),
        name=repo.rpartition("/")[2],
        base=base if is_of_hub else _public(base),
        rows=_public(rows),
        algorithm=algorithm,
        step=step,
        auto="AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM",
        repo=repo,
        metrics=_metrics(run, step),
        curves=curves,
        settings=re.sub(r"(?<=[\s'\"])[^\s'\"]*/(?=[^/\s]+\.py:)", "", settings),
        versions=", ".join(f"{package} {version}" for package, version in packages.items()),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return card


def _public(place: str) -> str:
    """A URL without a password; of a path the last name."""
    return re.sub("//[^/@]*@", "//", place) if "://" in place else place.rpartition("/")[2]


def _metrics(run: Path, step: int) -> str:
    table = ["| | metric | first | last |", "|---|---|---:|---:|"]
    for kind in ("eval", "train"):
        lines = [line for line in read_metrics(run) if line["step"] <= step and line["kind"] == kind]
        for name in filter(_METRIC.fullmatch, lines[-1] if lines else ()):
            ends = [lines[at].get(name) for at in (0, -1)]
            table.append(" | ".join([f"| {kind}", name, *("–" if x is None else f"{x:.4g}" for x in ends), ""]))
    return "\n".join(table)


def push(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Make the repository if there is none, and commit the folder; returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise ValueError("it exists and is public, so nothing was pushed: name another, or leave --private out")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # of the network, the hub, the token
        reason = next(filter(None, str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{repo} at {api.endpoint}: {reason}") from error
    return str(url)


def exported(options: argparse.Namespace) -> int:
    """Export the model to RUN/hub; returns the step of its checkpoint."""
    run, chosen = options.run, options.checkpoint
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", options.repo):
        raise ValueError(f"{options.repo}: write YOUR_NAME/NAME")
    if not re.fullmatch(r"best|last|\d+", chosen):
        raise ValueError(f"--checkpoint {chosen}: write last, best or a step")
    if chosen == "best" and not (run / "best.json").exists():
        raise ValueError(f"{run} has no best checkpoint: it had no evaluation.best")
    step = json.loads((run / "best.json").read_text())["step"] if chosen == "best" else chosen
    shutil.rmtree(run / "hub", ignore_errors=True)
    command = [sys.executable, "-m", "rlprims", "export", str(run), str(run / "hub")]
    command += [] if chosen == "last" else ["--step", str(step)]
    command += ["--model", options.model] if options.model else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    found = re.search(r"step_(\d+)", done.stdout.replace("\n", ""))
    return int(found[1]) if found else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("repo", metavar="REPO", help="YOUR_NAME/NAME; it is made if there is none")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--checkpoint", default="last", help="last, the default, best, or a step")
    parser.add_argument("--model", help="critic, for example (default: policy; of a reward model's run: reward)")
    parser.add_argument("--dry-run", action="store_true", help="write RUN/hub and print the card; push nothing")
    options = parser.parse_args(arguments)
    folder = options.run / "hub"
    try:
        step = exported(options)
        card = write_card(options.run, step, folder, options.repo)
        if options.dry_run:
            print(f"{card}\nnot pushed: {folder}")
            return 0
        url = push(folder, options.repo, private=options.private, message=f"rlprims, step {step}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shutil.rmtree(folder)
    print(f"pushed: {url}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
