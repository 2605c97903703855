"""A reward model: scores of responses by a frozen sequence classifier."""

import re

import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlprims.batching import micro_batches
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig
from rlprims.execution._columns import right_padded
from rlprims.execution.hf._alone import window_of
from rlprims.execution.hf._forward import last_token_scores
from rlprims.execution.hf._micro_batches import token_budget
from rlprims.execution.hf._models import load_classifier, vocabulary_of
from rlprims.turns.tokens import Chat, encode, text_ids


class RewardModel:
    """A frozen sequence classifier with one label; its logit at the last token is the score.

    Its input is the policy's tokens; with ``reward_template`` it is the texts, tokenized by its own tokenizer.

    Raises:
        ValueError: it cannot be loaded, or its vocabulary differs from the policy's and there is no template.
    """

    def __init__(self, model: ModelConfig) -> None:
        if model.reward is None:
            raise ValueError("model.reward is not set: name a sequence classifier of one label")
        self.module = load_classifier(model.reward, model)
        self.device = next(self.module.parameters()).device
        self.tokenizer = AutoTokenizer.from_pretrained(model.reward)
        self.model, self.template = model, model.reward_template
        self.window = window_of(self.module.config)
        if self.template is None and self.tokenizer.get_vocab() != vocabulary_of(model.path):
            raise ValueError(
                f"{model.reward!r} has another vocabulary than {model.path!r}: let it read the texts by "
                "model.reward_template: chat, or a text with {question} and {response} in it"
            )

    @torch.no_grad()
    def scores(self, batch: DataProto) -> Tensor:
        """float32 (B,); NaN for a row that is longer than the model's window."""
        rows = self._tokens(batch)
        scores = torch.full((len(rows),), torch.nan)
        fit = [i for i, tokens in enumerate(rows) if 0 < len(tokens) <= self.window]
        lengths = [len(rows[i]) for i in fit]
        budget = token_budget(self.model, max(lengths, default=1))
        for part in micro_batches(lengths, max_tokens=budget):
            chosen = [fit[i] for i in part]
            tokens = [rows[i] for i in chosen]
            ids, mask = (x.to(self.device) for x in right_padded(tokens, max(map(len, tokens)), 0))
            rows_of_part = {"prompts": ids[:, :0], "responses": ids, "attention_mask": mask}
            scores[chosen] = last_token_scores(self.module, rows_of_part).cpu()
        return scores

    def _tokens(self, batch: DataProto) -> list[list[int]]:
        if self.template is None:
            ids = torch.cat([batch["prompts"], batch["responses"]], 1)
            return [row[keep].tolist() for row, keep in zip(ids, batch["attention_mask"].bool(), strict=True)]
        pairs = zip(batch["question"], batch["response"], strict=True)
        return [self._encode(self.template, {"question": q, "response": r}) for q, r in pairs]

    def _encode(self, template: str, texts: dict[str, str]) -> list[int]:
        if template == "chat":
            roles = {"user": texts["question"], "assistant": texts["response"]}
            messages = [{"role": role, "content": text} for role, text in roles.items()]
            return encode(self.tokenizer, Chat(self.tokenizer).text(messages))
        # In one substitution, because a question may contain "{response}".
        text = re.sub(r"\{(question|response)\}", lambda name: texts[name[1]], template)
        return text_ids(self.tokenizer, text, whole=True)
