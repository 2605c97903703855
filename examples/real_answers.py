"""Real model answers to four GSM8K questions: the score, the penalty and the advantage of each.

``python examples/real_answers.py [FILE] [GROUPS]``, or cell by cell in a notebook. FILE is GSM8K's own
example_model_solutions.jsonl; the default is an excerpt of it. A word stands for a token here.
"""

# %% Four answers to each question, as a batch
import json
import sys
from pathlib import Path

import torch
from einops import repeat

from rlprims import advantage, filters, rewards
from rlprims.rewards import verifiers
from rlprims.rewards.scoring import naive

EXCERPT = Path(__file__).parents[1] / "tests" / "rewards" / "data" / "gsm8k_model_answers.jsonl"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
MAX_LENGTH, BUFFER = 128, 64

file = Path(sys.argv[1]) if len(sys.argv) > 1 else EXCERPT
count = int(sys.argv[2]) if len(sys.argv) > 2 else 20
questions = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:count] if line]
responses = [question[model]["solution"] for question in questions for model in MODELS]
answers = [question["ground_truth"] for question in questions for _ in MODELS]
group_ids = repeat(torch.arange(len(questions)), "question -> (question model)", model=len(MODELS))
lengths = torch.tensor([len(response.split()) for response in responses])
response_mask = torch.arange(int(lengths.max())) < lengths[:, None]

# %% Score the texts; shape the scores; place them on the last token; compare within the group
scored = naive(verifiers.gsm8k, responses, answers)
penalty = rewards.overlong_penalty(response_mask, max_length=MAX_LENGTH, buffer_length=BUFFER) + 0.0  # no -0.0
token_rewards = rewards.at_last_token(scored.scores + penalty, response_mask)
advantages = advantage.grpo(token_rewards, group_ids, response_mask)

# %% The filter reads the raw score. On the shaped score it would keep groups in which all answers are wrong
kept = filters.varied_scores(scored.scores, group_ids)
trapped = filters.varied_scores(scored.scores + penalty, group_ids)

# %% Row by row
print(
    f"{'group':>5} {'kept':>5} {'score':>5} {'words':>5} {'penalty':>7} {'reward on':>10} {'advantage':>9}  ends with"
)
for row, response in enumerate(responses):
    place = token_rewards[row].nonzero().flatten().tolist()
    where = f"word {place[0] + 1}" if place else "(0)"
    keeps = "yes" if kept[row] else "TRAP" if trapped[row] else "no"
    print(
        f"{group_ids[row]:5d} {keeps:>5} {scored.scores[row]:5.0f} {lengths[row]:5d} {penalty[row]:7.2f} {where:>10} "
        f"{advantages[row, lengths[row] - 1]:9.2f}  {' '.join(response.split())[-24:]}"
    )
by_score, by_shaped = (int(keep.sum()) // len(MODELS) for keep in (kept, trapped))
print(f"\nkept by the score: {by_score} of {len(questions)} groups; by score + penalty: {by_shaped}")
