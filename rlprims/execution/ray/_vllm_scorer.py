"""A vLLM engine with frozen weights that scores texts: the log-probs of their tokens, or of other tokens there."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from transformers import AutoConfig
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, RayConfig
from rlprims.execution._ray_config import memory_options
from rlprims.execution.hf._alone import window_of


def scoring(**wanted: Any) -> SamplingParams:
    """The parameters of a request that scores its prompt. vLLM also samples a token, which nobody reads."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        flat_logprobs=True,  # lists of numbers instead of an object for each number
        output_kind=RequestOutputKind.FINAL_ONLY,
        **wanted,
    )


def engine_options(path: str, model: ModelConfig, cluster: RayConfig, *, devices: int, gpus: float) -> dict[str, Any]:
    """The options of vLLM that an engine that samples and one that only scores have in common."""
    options: dict[str, Any] = {
        "model": path,
        "dtype": cluster.mixed_precision or model.dtype,
        # On a CPU there are no CUDA graphs, and compiling with g++ instead takes seconds.
        "enforce_eager": current_platform.is_cpu() if cluster.enforce_eager is None else cluster.enforce_eager,
        "tensor_parallel_size": devices,
        "max_num_seqs": model.max_rows_per_generation,
        "max_logprobs": -1,  # no limit for requests
        "seed": 0,
        "disable_log_stats": True,
    }
    if torch.cuda.is_available() and "gpu_memory_utilization" not in cluster.engine_options:
        options |= memory_options(*torch.cuda.mem_get_info(), gpus=gpus, colocate=cluster.colocate)
    if cluster.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = cluster.kv_cache_bytes
    if devices > 1:
        options["distributed_executor_backend"] = "mp"  # child processes, which end with this process
    return options


class _Text(NamedTuple):
    """The tokens of a row's prompt and response."""

    row: int
    tokens: list[int]
    prompt: int  # the number of the prompt's tokens
    places: Tensor  # bool (T,), the places of the response's tokens in the row


class VllmScorer:
    """A vLLM engine in this process for the model ``path``, which scores the responses of a batch at temperature 1.

    ``model`` is the policy, whose tokens are scored, and the dtype.
    """

    def __init__(self, path: str, model: ModelConfig, cluster: RayConfig) -> None:
        self.longest = min(_window(path), _window(model.path))
        # A text may fill the window, and vLLM then wants one more place, for the token that it samples after it.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        devices, gpus = cluster.teacher_tensor_parallel_size, cluster.pools[cluster.roles.teacher].gpus
        self.llm = LLM(
            **engine_options(path, model, cluster, devices=devices, gpus=gpus),
            skip_tokenizer_init=True,
            max_model_len=self.longest + 1,
            enable_prefix_caching=False,  # vLLM does not read the cache for the log-probs of a prompt
        )
        config = self.llm.llm_engine.vllm_config
        self.takes_ids = bool(config.use_v2_model_runner)  # only this runner scores given tokens
        self.vocabulary = int(config.model_config.get_vocab_size())

    def log_probs(self, batch: DataProto) -> Tensor:
        """(B, T): the log-prob of each response token."""
        result = torch.zeros(batch["response_mask"].shape)
        for text, output in self._scored(self._texts(batch), lambda _: scoring(prompt_logprobs=0)):
            result[text.row, text.places] = _columns(output, text)[1][:, 0]
        return torch.where(batch["response_mask"], result, 0.0)

    def top(self, batch: DataProto, size: int) -> DataProto:
        """``teacher_topk_log_probs`` (B, T, K) of ``topk_ids``: the batch's, or the ``size`` likeliest tokens."""
        given = "topk_ids" in batch
        ids, log_probs = self._given(batch) if given else self._likeliest(batch, min(size, self.vocabulary))
        log_probs = torch.where(batch["response_mask"][..., None], log_probs, 0.0)
        return DataProto.from_dict(tensors={"topk_ids": ids, "teacher_topk_log_probs": log_probs})

    def _likeliest(self, batch: DataProto, size: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros((*batch["response_mask"].shape, size), dtype=torch.int64)
        log_probs = torch.zeros(ids.shape)
        for text, output in self._scored(self._texts(batch), lambda _: scoring(prompt_logprobs=size)):
            found, scores = _columns(output, text)
            ids[text.row, text.places], log_probs[text.row, text.places] = found[:, 1:], scores[:, 1:]
        return torch.where(batch["response_mask"][..., None], ids, 0), log_probs

    def _given(self, batch: DataProto) -> tuple[Tensor, Tensor]:
        ids, texts = batch["topk_ids"], self._texts(batch)
        log_probs = torch.zeros(ids.shape)
        wanted = {text.row: ids[text.row, text.places].long() for text in texts}
        if self.takes_ids:
            for text, output in self._scored(
                texts,
                lambda text: scoring(
                    prompt_logprob_token_ids=wanted[text.row].numpy(), prompt_logprob_start=text.prompt - 1
                ),
            ):
                log_probs[text.row, text.places] = torch.tensor(output.prompt_token_id_logprobs)
            return ids, log_probs
        for each in texts:  # one at a time: vLLM returns the whole vocabulary as lists
            for text, output in self._scored([each], lambda _: scoring(prompt_logprobs=-1)):
                found, scores = _columns(output, text)
                whole = torch.empty(len(found), self.vocabulary).scatter_(1, found[:, 1:], scores[:, 1:])
                log_probs[text.row, text.places] = whole.gather(1, wanted[text.row])
        return ids, log_probs

    def _texts(self, batch: DataProto) -> list[_Text]:
        """The texts of the rows that have a token to score."""
        attention, width = batch["attention_mask"].bool(), batch["prompts"].shape[1]
        tokens = torch.cat([batch["prompts"], batch["responses"]], 1)
        texts = []
        for row in batch["response_mask"].any(-1).nonzero()[:, 0].tolist():
            text = tokens[row, attention[row]].tolist()
            if len(text) > self.longest:
                raise ValueError(
                    f"model.teacher: expected rows of at most {self.longest} tokens, its context window, got "
                    f"{len(text)}; lower sampling.max_new_tokens or data.max_prompt_length"
                )
            texts.append(_Text(row, text, int(attention[row, :width].sum()), attention[row, width:]))
        return texts

    def _scored(
        self, texts: Sequence[_Text], parameters: Callable[[_Text], SamplingParams]
    ) -> Iterator[tuple[_Text, RequestOutput]]:
        """Score the texts together; yields each when it is complete."""
        engine = self.llm.llm_engine
        for i, text in enumerate(texts):
            engine.add_request(str(i), tokens_input(text.tokens), parameters(text))
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield texts[int(output.request_id)], output


def _columns(output: RequestOutput, text: _Text) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs, both (length, 1 + K), at the response's places: its own token, then the likeliest."""
    flat, count = output.prompt_logprobs, len(text.tokens) - 1  # none for the first token of the prompt
    ids, log_probs = (rearrange(torch.tensor(x), "(n k) -> n k", n=count) for x in (flat.token_ids, flat.logprobs))
    return ids[text.prompt - 1 :], log_probs[text.prompt - 1 :]


def _window(path: str) -> int:
    return window_of(AutoConfig.from_pretrained(path))
