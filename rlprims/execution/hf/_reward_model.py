"""A reward model: scores of responses by a frozen sequence classifier."""

import re

import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlprims.batching import micro_batches
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig
from rlprims.execution._columns import left_padded
from rlprims.execution.hf._micro_batches import token_budget
from rlprims.execution.hf._models import load_classifier


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
        self.template = model.reward_template
        self.model = model
        self.window = int(getattr(self.module.config, "max_position_embeddings", 2**31))
        if (
            self.template is None
            and self.tokenizer.get_vocab() != AutoTokenizer.from_pretrained(model.path).get_vocab()
        ):
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
            # Padded on the left, so that the last column holds the last token of every row.
            ids, mask = left_padded(tokens, max(map(len, tokens)), 0)
            attention = mask.long().to(self.device)
            logits = self.module(
                input_ids=ids.to(self.device),
                attention_mask=attention,
                position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
            ).logits
            scores[chosen] = logits[:, 0].float().cpu()
        return scores

    def _tokens(self, batch: DataProto) -> list[list[int]]:
        if self.template is None:
            ids = torch.cat([batch["prompts"], batch["responses"]], 1)
            return [row[keep].tolist() for row, keep in zip(ids, batch["attention_mask"].bool(), strict=True)]
        pairs = zip(batch["question"], batch["response"], strict=True)
        return [self._encode(self.template, {"question": q, "response": r}) for q, r in pairs]

    def _encode(self, template: str, texts: dict[str, str]) -> list[int]:
        if template == "chat":
            messages = [
                {"role": "user", "content": texts["question"]},
                {"role": "assistant", "content": texts["response"]},
            ]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        else:
            # In one substitution, because a question may contain "{response}".
            text = re.sub(r"\{(question|response)\}", lambda name: texts[name[1]], template)
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=template != "chat")
        return tokens
