"""A reward model on a server, ``vllm serve MODEL --runner pooling``, that reads question and response as a chat.

In a run, with the path of this file::

    rewards:
      - fn: {fn: examples/reward_server.py:reward, url: "http://host:8000", model: MODEL}
        name: preference
        concurrency: 32
"""

import httpx2


async def reward(
    response: str, answer: object = None, question: str = "", *, url: str, model: str, seconds: float = 60.0
) -> float:
    """The logit of a model with one label. A call that fails is a row without a score."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
    request = {"model": model, "messages": messages, "use_activation": False}
    async with httpx2.AsyncClient(timeout=seconds) as client:
        found = await client.post(f"{url}/classify", json=request)
    found.raise_for_status()
    [value] = found.json()["data"][0]["probs"]
    return float(value)
