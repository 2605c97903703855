"""A whole step of the local trainer beside TRL's GRPOTrainer: ``python -m benchmarks.trainer_step``.

The same model, prompts, group size, lengths, algorithm, float32 and one thread, in one process: each of TRL's steps is
followed by one of ours. A step samples a batch, scores it, and makes the updates on it.
"""

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks import _machine, _stages, _tiny
from benchmarks._harness import settle_allocator
from benchmarks._peers import peer
from rlprims import algorithms
from rlprims.algorithms import use
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, Sampling
from rlprims.execution.local import LocalExecution
from rlprims.trainer.config import Config
from rlprims.trainer.data import DataConfig, Example
from rlprims.trainer.loop import Trainer

RESULTS = Path("docs/benchmarks/trainer_step.json")
PAGE = """\
# A step of the local trainer beside TRL's GRPOTrainer

Measured by `python -m benchmarks.trainer_step` at {commit}; do not edit.

The model is a Qwen2 of two layers, width 128, in
float32, with one thread. The job is GRPO with two epochs over 64 prompts of 16 tokens x 8 samples of 64 tokens,
with KL 0.04, unless the setting has other values (length: 8 prompts; vocabulary: 2; shared heads: 4 heads read
the same keys). In one process each step of TRL is followed by one of rlprims. Seconds are medians of CPU
seconds. **ratio** is the median of the ratios of the rounds: above 1 rlprims is faster. **loss gap** is the
difference of the two losses for the same rollouts and weights, over the mean |advantage|. Both call the same
torch; on AMD's processors with AVX-512 rlprims used oneDNN for matrix products, which is twice as fast there as
MKL.

[SmolLM2-135M](smollm_step.md) has a step of a real language model, with its sampling.

{table}
{picture}
## The seconds of a step by stage

The table has the CPU seconds of the same steps by stage, and the parts that torch's profiler measured in one
more step: matrix products, attention, and the rest (norms, activations, softmax and Python). The old log-probs
are those of the sampler, so only the reference's log-probs are computed.

{stages}

{limits}

{cpu} · {versions} · {date} · {minutes:.1f} minutes of CPU time
"""


@dataclass(frozen=True)
class Setting:
    """What both are given."""

    prompts: int = 64
    group: int = 8
    prompt_length: int = 16
    max_new_tokens: int = 64
    vocabulary: int = 64
    kv_heads: int = 4  # of 4 heads
    p_end: float = 0.0  # at each token; 0: all responses have the same length
    kl_coef: float = 0.04
    epochs: int = 2


SETTINGS = {
    "equal": Setting(),
    "ragged": Setting(p_end=1 / 40),  # half of the longest, in the mean
    "no KL and one epoch": Setting(kl_coef=0.0, epochs=1),
    "shared heads": Setting(kv_heads=1),
    **{f"batch {8 * n}": Setting(prompts=n) for n in (8, 16, 32)},
    **{f"length {n}": Setting(prompts=8, max_new_tokens=n) for n in (32, 64, 128, 256)},
    **{f"vocabulary {n}": Setting(prompts=2, vocabulary=n) for n in (64, 1024, 8192, 32768)},
}
PROFILED = ("equal", "ragged", "vocabulary 8192")
TARGETS = {"equal": 2.0, "ragged": 3.0}


class Ours:
    """The trainer of this library, without a session around it."""

    def __init__(self, setting: Setting, model: Path) -> None:
        tokenizer = _tiny.tokenizer(setting.vocabulary)
        algorithm = algorithms.grpo(kl_coef=setting.kl_coef, dialect="trl-1.16").replace(
            group_size=setting.group, epochs=setting.epochs
        )
        config = Config(
            run_dir=model / "run",
            prompts_per_step=setting.prompts,
            algorithm=algorithm,
            model=ModelConfig(
                path=str(model),
                device="cpu",
                max_tokens_per_micro_batch=4096,
                fused_head=setting.vocabulary >= 1024,
            ),
            data=DataConfig(train=model / "none.jsonl", shuffle=False),
            verifier=use(_tiny.even_share),
            sampling=Sampling(max_new_tokens=setting.max_new_tokens),
            recompute_log_probs_every=10**6,  # after the first step, which is not timed
            optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0),
        )
        texts = _tiny.prompts(setting.prompts, setting.prompt_length, setting.vocabulary)
        examples = [Example(text, tokenizer.encode(text), "", "made") for text in texts]
        self.trainer = Trainer(config, self.build(config), tokenizer, examples)

    @staticmethod
    def build(config: Config) -> LocalExecution:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        return LocalExecution(
            config.model,
            config.optimizer,
            algorithm=config.algorithm,
            tokenizer=tokenizer,
            temperature=1.0,
            updates=1000,
        )

    def step(self) -> float:
        """Response tokens that it sampled."""
        return self.trainer.step().metrics["generated_tokens"]

    def gap(self, peer: Any) -> float:
        """|our loss - its loss| of the same rollouts and weights, as a share of the mean |advantage|."""
        inputs = peer._buffered_inputs[0]
        with torch.no_grad():
            theirs = float(peer._compute_loss(peer.model, inputs))
        mask, size = inputs["completion_mask"].bool(), len(inputs["completion_mask"])
        columns = {
            "prompts": inputs["prompt_ids"],
            "responses": inputs["completion_ids"],
            "attention_mask": torch.cat([inputs["prompt_mask"].bool(), mask], 1),
            "response_mask": mask,
            "group_ids": torch.arange(size) // self.trainer.algorithm.group_size,
            "advantages": inputs["advantages"][:, None] * mask,
        }
        for name in ("old", "ref"):
            if inputs.get(f"{name}_per_token_logps") is not None:
                columns[f"{name}_log_probs"] = inputs[f"{name}_per_token_logps"]
        same = self.build(self.trainer.config)
        same.training.policy.module.load_state_dict(peer.model.state_dict())
        algorithm = self.trainer.algorithm
        batch = DataProto.from_dict(tensors=columns)
        if "old_log_probs" not in batch:
            batch["old_log_probs"] = same.log_probs(batch)
        return abs(same.update(batch, algorithm).loss - theirs) / float(inputs["advantages"].abs().mean())


def trl_trainer(setting: Setting, model: Path, after_step: Callable[[Any], bool]) -> Any:
    """Its GRPOTrainer, the whole batch at once, which is what it does by default; ``after_step`` says when to stop."""
    trl, datasets = peer("trl"), peer("datasets")
    if trl is None or datasets is None:
        raise SystemExit("the peer of this benchmark is TRL: make bench installs it")
    lists = _tiny.prompts(setting.prompts, setting.prompt_length, setting.vocabulary)

    class After(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step % setting.epochs == 0:
                control.should_training_stop = after_step(trainer)
            return control

    def even_share(completions: list[str], **_: Any) -> list[float]:
        return [_tiny.even_share(text) for text in completions]

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=even_share,
        args=trl.GRPOConfig(
            output_dir=str(model / "trl"),
            per_device_train_batch_size=setting.prompts * setting.group,
            num_generations=setting.group,
            max_completion_length=setting.max_new_tokens,
            beta=setting.kl_coef,
            num_iterations=setting.epochs,
            loss_type="grpo",
            top_k=0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=10_000,
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1000,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in lists]),
        processing_class=_tiny.tokenizer(setting.vocabulary),
        callbacks=[After()],
    )
    return trainer


def compare(setting: Setting, rounds: int, seconds: float, *, profiled: bool) -> dict[str, Any]:
    """CPU seconds of a step of each, and their ratio; the first step of both is not counted.

    As many rounds as ``seconds`` hold, at least two and at most ``rounds``.
    """
    times: dict[str, list[float]] = {"rlprims": [], "trl": []}
    tokens, gap, started = [], 0.0, process_time()
    began = started
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        window = setting.prompt_length + setting.max_new_tokens
        model = _tiny.save_model(
            Path(directory),
            vocabulary=setting.vocabulary,
            window=window,
            p_end=setting.p_end,
            kv_heads=setting.kv_heads,
        )
        ours = Ours(setting, model)
        by_stage = _stages.timed(ours.trainer.execution)

        def after_step(peer: Any) -> bool:
            nonlocal began, gap
            theirs, now = process_time() - began, process_time()
            sampled = ours.step()
            mine = process_time() - now
            if peer.state.global_step > setting.epochs:
                times["trl"].append(theirs)
                times["rlprims"].append(mine)
                tokens.append(sampled)
            else:
                gap = ours.gap(peer)
                for calls in by_stage.values():
                    calls.clear()
            began = process_time()
            return len(tokens) == rounds or (len(tokens) > 1 and began - started > seconds)

        trl_trainer(setting, model, after_step).train()
        if profiled:
            of_steps = _stages.per_step(by_stage, len(tokens))
            found["stages"] = {"seconds": of_steps, "shares": _stages.shares(ours.step)}
    ratios = sorted(theirs / ours for theirs, ours in zip(times["trl"], times["rlprims"], strict=True))
    return {
        **asdict(setting),
        "ratio": median(ratios),
        "ratios": ratios,
        "seconds": {who: median(each) for who, each in times.items()},
        "tokens": sum(tokens) / len(tokens),
        "loss_gap": gap,
        "cpu_seconds": process_time() - started,
        **found,
    }


def plot(results: dict[str, Any], out: Path) -> None:
    """Seconds of a step against batch, length and vocabulary."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for axis, (kind, label) in zip(
        axes, {"batch": "responses", "length": "tokens of a response", "vocabulary": "vocabulary"}.items(), strict=True
    ):
        points = sorted((int(name.split()[1]), r) for name, r in results.items() if name.split()[0] == kind)
        if kind == "batch" and "equal" in results:
            points.append((results["equal"]["prompts"] * results["equal"]["group"], results["equal"]))
        for who, name in (("trl", "TRL 1.16"), ("rlprims", "rlprims")):
            axis.loglog([x for x, _ in points], [r["seconds"][who] for _, r in points], "o-", label=name)
        axis.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU seconds of a step")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def table(results: dict[str, Any]) -> str:
    lines = ["| setting | tokens | TRL s | rlprims s | ratio | loss gap |", "|---|---:|---:|---:|---:|---:|"]
    for name, r in results.items():
        seconds = r["seconds"]
        numbers = f"{r['tokens']:.0f} | {seconds['trl']:.2f} | {seconds['rlprims']:.2f} | {r['ratio']:.2f}"
        lines.append(f"| {name} | {numbers} | {r['loss_gap']:.0e} |")
    return "\n".join(lines)


def page(found: dict[str, Any], *, drawn: bool) -> str:
    return PAGE.format(
        commit=found["machine"]["commit"],
        table=table(found["results"]),
        stages=_stages.table(found["results"]),
        limits=_stages.limits(found["results"], TARGETS),
        minutes=sum(r.get("cpu_seconds", 0.0) for r in found["results"].values()) / 60,
        picture="\n![CPU seconds against batch, length and vocabulary](trainer_step.png)\n" if drawn else "",
        cpu=found["machine"]["cpu"],
        versions=", ".join(f"{package} {version}" for package, version in found["versions"].items()),
        date=found["date"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.trainer_step", description="A step beside TRL's, as a ratio.")
    parser.add_argument("--only", default=",".join(SETTINGS), help="of %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="at most, of each setting")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="of CPU time after which a setting has no more rounds"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; what it has of other settings stays")
    parser.add_argument("--plot", action="store_true", help="draw what is there, and measure nothing")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {"results": {}}
    if options.plot:
        plot(found["results"], options.out.with_suffix(".png"))
        options.out.with_suffix(".md").write_text(page(found, drawn=True), encoding="utf-8")
        return
    picture = options.out.with_suffix(".png")
    torch.set_num_threads(1)
    settle_allocator()
    for name in options.only.split(","):
        found["results"][name] = compare(SETTINGS[name], options.rounds, options.seconds, profiled=name in PROFILED)
        versions = _machine.versions()
        found |= {"date": datetime.date.today().isoformat(), "machine": _machine.describe(), "versions": versions}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(page(found, drawn=picture.exists()), encoding="utf-8")
        print(table({name: found["results"][name]}), flush=True)


if __name__ == "__main__":
    main()
