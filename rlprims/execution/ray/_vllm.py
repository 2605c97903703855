"""The vLLM engine, made to sample as everything here does: by the uniforms of (seed, sample id)."""

import itertools
import math
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import GenerationConfig
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution._config import LoraConfig, ModelConfig, Sampling
from rlprims.execution._kept import ids_left
from rlprims.execution.hf import prompt_ids, special_ids, with_responses
from rlprims.execution.hf._adapters import save_adapter
from rlprims.execution.hf._sampler import Responses, choose, processed, uniforms


class _Draw:
    """One response: which logits become which distribution, its uniforms, what was drawn: its log-probs and sets."""

    def __init__(self, sampling: Sampling, u: Tensor) -> None:
        self.process = processed(sampling)
        self.u = u if sampling.temperature > 0 else None
        self.log_probs: list[float] = []
        self.kept: list[Tensor] | None = [] if sampling.truncates else None

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        """Logits that leave one token: the one at this position's quantile."""
        position = len(output_ids)
        scores = self.process(logits.float()[None])
        chosen = choose(scores, None if self.u is None else self.u[position : position + 1].to(logits.device))
        # A preempted request is computed again from its first token.
        del self.log_probs[position:]
        self.log_probs.append(float(torch.log_softmax(scores, -1)[0, chosen[0]]))
        if self.kept is not None:
            del self.kept[position:]
            self.kept.append(ids_left(scores)[0])
        return torch.full_like(logits, -math.inf).index_fill_(0, chosen, 0.0)


_DRAWS: dict[int, _Draw] = {}
"""Of the requests that the engine of this process works on."""
_NUMBERS = itertools.count()
_ENDED = {
    "stop": Ended.STOP,
    "length": Ended.LENGTH,
    "abort": Ended.ABORTED,
    "repetition": Ended.ABORTED,
    "error": Ended.ERROR,
}
"""What vLLM calls the reasons."""


class Quantiles(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Hands each request's logits to its draw."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return _DRAWS[params.extra_args["draw"]] if params.extra_args and "draw" in params.extra_args else None


class WorkerExtension:
    """Methods that vLLM's worker gains."""

    model_runner: Any

    def load_weights_in_place(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        # Of tied weights only the embedding comes, and on a CPU the head keeps its own packed copy of the old one.
        model = self.model_runner.get_model()
        named = model.named_parameters(remove_duplicate=False)
        embeddings = {id(parameter) for name, parameter in named if "embed" in name}
        for module in model.modules():
            if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
                module.quant_method.process_weights_after_loading(module)


class _Adapter:
    """The one adapter that the engine holds; without a request the engine samples from the model itself."""

    def __init__(self, config: LoraConfig, base: str) -> None:
        self.config, self.base = config, base
        self.directory = tempfile.TemporaryDirectory(prefix="rlprims-adapter-")
        self.request: LoRARequest | None = None

    def options(self) -> dict[str, Any]:
        ranks = sorted(get_args(MaxLoRARanks))
        room = next((rank for rank in ranks if rank >= self.config.rank), None)
        if room is None:
            raise ValueError(f"vLLM takes adapters up to rank {ranks[-1]}: set model.lora.sync: merged")
        return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}

    def renew(self, engine: Any, tensors: dict[str, Tensor]) -> None:
        old, number = self.request, self.request.lora_int_id + 1 if self.request else 1
        # A number or name that was there before would bring back what was there before.
        path = Path(self.directory.name) / str(number)
        save_adapter(path, tensors, self.config, base=self.base)
        self.request = LoRARequest(f"adapter-{number}", number, str(path))
        if old:
            engine.remove_lora(old.lora_int_id)
            shutil.rmtree(old.lora_path)
        engine.add_lora(self.request)


class VllmEngine:
    """An engine in this process. Its samples are functions of (weights, prompt, seed, sample id), as the local ones."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Any,
        *,
        context_window: int,
        kv_cache_bytes: int | None,
        sleeps: bool = False,
    ) -> None:
        settings = GenerationConfig.from_pretrained(model.path)
        self.pad_token_id, self.end_ids = special_ids(settings, tokenizer)
        memory = {"kv_cache_memory_bytes": kv_cache_bytes} if kv_cache_bytes else {}
        self.adapter = _Adapter(model.engine_lora, model.path) if model.engine_lora else None
        self.frees_memory = bool(current_platform.is_sleep_mode_available())
        self.llm = LLM(
            model.path,
            enable_sleep_mode=sleeps and self.frees_memory,  # a CPU refuses the option and takes the calls
            dtype=model.dtype,
            enforce_eager=True,
            max_model_len=context_window,
            max_num_seqs=model.max_rows_per_generation,
            seed=0,
            logits_processors=[Quantiles],
            worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
            disable_log_stats=True,
            **memory,
            **(self.adapter.options() if self.adapter else {}),
        )

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        ids = prompt_ids(prompts, prompt_width)
        u = uniforms(seed, prompts["sample_id"].tolist(), sampling.max_new_tokens)
        draws = {next(_NUMBERS): _Draw(sampling, row) for row in u}
        _DRAWS.update(draws)
        try:
            outputs = self.llm.generate(
                [TokensPrompt(prompt_token_ids=prompt) for prompt in ids],
                [
                    SamplingParams(
                        temperature=0.0,  # the draw leaves one token
                        max_tokens=sampling.max_new_tokens,
                        stop_token_ids=self.end_ids,
                        ignore_eos=True,  # the ends are those of end_ids
                        stop=list(sampling.stop) or None,
                        include_stop_str_in_output=True,
                        detokenize=bool(sampling.stop),
                        extra_args={"draw": number},
                    )
                    for number in draws
                ],
                use_tqdm=False,
                lora_request=self.adapter and self.adapter.request,
            )
        finally:
            for number in draws:
                del _DRAWS[number]
        rows, limit = len(ids), sampling.max_new_tokens
        tokens = torch.full((rows, limit), self.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(rows, limit, dtype=torch.bool)
        log_probs = torch.zeros(rows, limit)
        ended = torch.full((rows,), Ended.STOP, dtype=torch.int8)
        kept_ids = [torch.zeros(0, dtype=torch.int32)]
        kept_counts = torch.zeros(rows, limit, dtype=torch.int32)
        for i, (output, draw) in enumerate(zip(outputs, draws.values(), strict=True)):
            response = output.outputs[0]
            length = len(response.token_ids)
            tokens[i, :length] = torch.tensor(response.token_ids, dtype=torch.int64)
            mask[i, :length] = True
            log_probs[i, :length] = torch.tensor(draw.log_probs[:length])
            # The engine says "length" for a full window, too.
            full = response.finish_reason == "length" and length < limit
            ended[i] = Ended.CONTEXT if full else _ENDED.get(response.finish_reason, Ended.ERROR)
            if draw.kept is not None:
                kept_ids += draw.kept[:length]
                kept_counts[i, :length] = torch.tensor([len(ids) for ids in draw.kept[:length]])
        kept = (torch.cat(kept_ids), kept_counts) if sampling.truncates else ()
        responses = Responses(tokens, mask, log_probs, ended, *kept)
        return with_responses(prompts, responses, prompt_width=prompt_width, pad_token_id=self.pad_token_id)

    def sleep(self, level: int) -> None:
        # Level 2 forgets the model too, and an adapter alone does not bring it back.
        self.llm.sleep(level=1 if self.adapter else level)

    def wake(self) -> None:
        self.llm.wake_up()

    def score(self, tokens: Sequence[int]) -> list[float]:
        """The log-prob of each token but the first, at temperature 1."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(tokens))],
            params,
            use_tqdm=False,
            lora_request=self.adapter and self.adapter.request,
        )
        return [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.adapter:
            self.adapter.renew(self.llm.llm_engine, dict(weights))
        else:
            self.llm.collective_rpc("load_weights_in_place", args=(list(weights),))
        self.llm.reset_prefix_cache()
