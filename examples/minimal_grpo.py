"""GRPO on one page: a Hugging Face model, the primitives of rlprims, and no trainer.

    make demo                                        # once: it makes runs/words-base and runs/words-data
    .venv/bin/python examples/minimal_grpo.py        # two to four minutes on one core
    python examples/minimal_grpo.py --model my-model --data my.jsonl   # rows with "question" and "answer"

The whole algorithm is in `step`: sample a group of responses to each prompt, score them, compare each with its group,
and take one optimizer step on the clipped surrogate. To change the algorithm, change one of its lines.
"""

import argparse
import json
import os
from pathlib import Path
from random import Random

# Threads that wait by spinning slow down everything else on a busy machine. It must be set before torch starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from einops import repeat
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlprims import advantage, diagnostics, filters, logprobs, losses, rewards
from rlprims.rewards import verifiers
from rlprims.types import merge_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/words-base", help="a Hugging Face folder or name (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("runs/words-data/train.jsonl"), help="JSON lines")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step (%(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="responses to each prompt (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=56)
    parser.add_argument("--micro-batch", type=int, default=64, help="responses of one forward pass (%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for path in (Path(options.model), options.data):
        if not path.exists():
            parser.error(f"{path} does not exist: run `make demo` once, which makes it, or name another")

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    shuffle = Random(options.seed)

    for number in range(1, options.steps + 1):
        batch = shuffle.sample(rows, options.prompts)
        metrics = step(model, tokenizer, optimizer, batch, options)
        print(f"step {number:4d}  " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()), flush=True)


def step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    rows: list[dict[str, str]],
    options: argparse.Namespace,
) -> dict[str, float]:
    """One step of GRPO on these prompts. Returns its metrics."""
    # Sample: the responses to one prompt are neighbours, and each has the id of its prompt.
    prompts = tokenizer([row["question"] for row in rows], return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        input_ids = model.eval().generate(
            **prompts,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=options.group_size,
            max_new_tokens=options.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
    prompt_length = prompts.input_ids.shape[1]
    attention_mask = repeat(prompts.attention_mask, "p t -> (p g) t", g=options.group_size)
    responses = input_ids[:, prompt_length:]
    response_mask = before_end(responses, tokenizer.eos_token_id)
    attention_mask = torch.cat([attention_mask, response_mask.long()], dim=1)
    group_ids = repeat(torch.arange(len(rows), device=model.device), "p -> (p g)", g=options.group_size)

    # Score: one number for each response, on its last token.
    answers = [row["answer"] for row in rows for _ in range(options.group_size)]
    texts = tokenizer.batch_decode(responses.where(response_mask, tokenizer.pad_token_id), skip_special_tokens=True)
    scores = torch.tensor(
        [verifiers.tagged_answer(text, answer)["score"] for text, answer in zip(texts, answers, strict=True)],
        device=model.device,
    )

    # Compare: a group whose responses all have the same score has no gradient, so it is dropped.
    token_rewards = rewards.at_last_token(scores, response_mask)
    advantages = advantage.grpo(token_rewards, group_ids, response_mask)
    kept = filters.varied_scores(scores, group_ids).nonzero().flatten()

    # Update: the losses of the micro-batches sum to the loss of the step, because all of them divide by its totals.
    model.train()
    totals = losses.count_totals(response_mask[kept])
    metrics = []
    for i in kept.split(options.micro_batch):
        logits = model(input_ids[i], attention_mask=attention_mask[i]).logits[:, prompt_length - 1 : -1]
        log_probs = logprobs.from_logits(logits, responses[i])
        old_log_probs = log_probs.detach()  # one update per batch: the policy is still the one that sampled
        token_losses = losses.clipped_surrogate(
            log_probs, old_log_probs, advantages[i], response_mask[i], clip_low=0.2, clip_high=0.28
        )
        losses.token_mean(token_losses, response_mask[i], totals=totals).backward()
        entropies = logprobs.entropy_from_logits(logits.detach())
        metrics.append({"entropy": diagnostics.mean_over_tokens(entropies, response_mask[i])})
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    return {
        "score": float(scores.mean()),
        "length": float(response_mask.sum(-1).float().mean()),
        "trained": len(kept) / len(scores),
        **{name: float(metric.value()) for name, metric in merge_metrics(*metrics).items()},
    }


def before_end(responses: Tensor, end_id: int) -> Tensor:
    """True on each token up to and including the first end token, which the policy also sampled."""
    ended = (responses == end_id).long().cumsum(-1)
    return (ended == 0) | ((ended == 1) & (responses == end_id))


if __name__ == "__main__":
    main()
