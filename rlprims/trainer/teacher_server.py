"""A teacher on a server with OpenAI's completions and vLLM's ``prompt_logprobs``, such as ``vllm serve MODEL``."""

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution import ExecutionError
from rlprims.rewards._http import RemoteError, client, send
from rlprims.rewards._waiting import gather, wait_for


def served_log_probs(url: str, rows: DataProto, tokenizer: Any) -> Tensor:
    """float32 (B, T): log-probs of the responses' tokens by the server at ``url``, at temperature 1; 0 elsewhere.

    Raises:
        ExecutionError: no answer after several attempts, another vocabulary, or an answer without these numbers.
    """
    attention = rows["attention_mask"].bool()
    tokens = torch.cat([rows["prompts"], rows["responses"]], 1)
    ids = [row[read].tolist() for row, read in zip(tokens, attention, strict=True)]
    try:
        found = wait_for(_scored(url.rstrip("/"), ids, tokenizer))
    except RemoteError as error:
        raise ExecutionError(f"model.teacher: {error}") from None
    log_probs, in_response = torch.zeros(rows["responses"].shape), attention[:, rows["prompts"].shape[1] :]
    for of_row, mask, values in zip(log_probs, in_response, found, strict=True):
        of_row[mask] = torch.tensor(values)[len(values) - int(mask.sum()) :]
    return log_probs


async def _scored(url: str, ids: list[list[int]], tokenizer: Any) -> list[list[float]]:
    async with client() as connections:

        async def ask(address: str, **request: Any) -> Any:
            return await send(connections, address, json.dumps(request).encode(), timeout=600, retries=4, backoff=1.0)

        async def score(row: list[int]) -> list[float]:
            answer = await ask(f"{url}/completions", prompt=row, max_tokens=1, prompt_logprobs=0)
            try:
                read = answer["choices"][0]["prompt_logprobs"][1:]
                return [at[str(token)]["logprob"] + 0.0 for at, token in zip(read, row[1:], strict=True)]
            except (KeyError, IndexError, TypeError, ValueError):
                raise RemoteError("wrong answer", f"{url}: expected prompt_logprobs of each token") from None

        text = tokenizer.decode(ids[0])
        answer = await ask(f"{url.removesuffix('/v1')}/tokenize", prompt=text, add_special_tokens=False)
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not isinstance(answer, dict) or answer.get("tokens") != own:
            raise RemoteError("wrong answer", f"{url}: another vocabulary than the policy's")
        return await gather((partial(score, row) for row in ids), 64)
