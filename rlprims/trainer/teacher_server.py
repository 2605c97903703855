"""A teacher on a server with OpenAI's completions and vLLM's ``prompt_logprobs``, such as ``vllm serve MODEL``."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlprims._extras import package
from rlprims.data_proto import DataProto
from rlprims.execution import ExecutionError
from rlprims.rewards._waiting import gather, wait_for

if TYPE_CHECKING:
    import httpx2

_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before the further attempts after no answer, HTTP 408, 425, 429 or 5xx."""


def served(url: str, rows: DataProto, tokenizer: Any, size: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and float32 log-probs (B, T, 1 + size) by the server at ``url``, at temperature 1; 0 outside of responses.

    They are of the response's own token, and then of the ``size`` likeliest ones.

    Raises:
        ExecutionError: no answer after several attempts, another vocabulary, or an answer without these numbers.
    """
    attention = rows["attention_mask"].bool()
    tokens = torch.cat([rows["prompts"], rows["responses"]], 1)
    texts = [row[read].tolist() for row, read in zip(tokens, attention, strict=True)]
    found = wait_for(_scored(url.rstrip("/"), texts, tokenizer, size))
    log_probs = torch.zeros(*rows["responses"].shape, 1 + size)
    ids, in_response = log_probs.long(), attention[:, rows["prompts"].shape[1] :]
    for i, mask in enumerate(in_response):
        if count := int(mask.sum()):
            ids[i, mask] = torch.tensor([[token for token, _ in at] for at in found[i][-count:]])
            log_probs[i, mask] = torch.tensor([[value for _, value in at] for at in found[i][-count:]])
    return ids, log_probs


async def _scored(url: str, texts: list[list[int]], tokenizer: Any, size: int) -> list[list[list[tuple[int, float]]]]:
    httpx2 = package("httpx2", "httpx2", "a teacher on a server")
    async with httpx2.AsyncClient(timeout=600.0, limits=httpx2.Limits(max_connections=None)) as client:

        async def score(row: list[int]) -> list[list[tuple[int, float]]]:
            answer = await _ask(client, f"{url}/completions", prompt=row, max_tokens=1, prompt_logprobs=size)
            try:
                read, found = answer["choices"][0]["prompt_logprobs"][1:], []
                for at, token in zip(read, row[1:], strict=True):
                    names = [str(token), *sorted(at, key=lambda name: at[name]["rank"])[:size]]
                    found.append([(int(name), at[name]["logprob"] + 0.0) for name in names])
                    if len(names) < 1 + size:
                        raise ValueError
                return found
            except (KeyError, IndexError, TypeError, ValueError):
                raise ExecutionError(f"model.teacher: {url}: expected prompt_logprobs of each token") from None

        text = tokenizer.decode(texts[0])
        answer = await _ask(client, f"{url.removesuffix('/v1')}/tokenize", prompt=text, add_special_tokens=False)
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not isinstance(answer, dict) or answer.get("tokens") != own:
            raise ExecutionError(f"model.teacher: {url}: another vocabulary than the policy's")
        return await gather((partial(score, row) for row in texts), 64)


async def _ask(client: "httpx2.AsyncClient", url: str, **request: Any) -> Any:
    """The server's answer, after several attempts if there is none."""
    import httpx2

    for wait in (*_WAITS, None):
        try:
            reply = await client.post(url, json=request)
            if reply.is_success:
                return reply.json()
            passing, reason = reply.status_code in (408, 425, 429) or reply.status_code >= 500, reply.text[:300]
            problem = f"HTTP {reply.status_code} {reason}"
        except (httpx2.HTTPError, ValueError) as error:
            passing, problem = isinstance(error, httpx2.HTTPError), f"{type(error).__name__}: {error}"
        if wait is None or not passing:
            raise ExecutionError(f"model.teacher: {url}: {' '.join(problem.split())}") from None
        await asyncio.sleep(wait)
