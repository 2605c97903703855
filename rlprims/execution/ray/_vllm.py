"""The vLLM engine. Its log-probs are of the distribution that it samples from, after temperature, top-k and so on."""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from vllm import LLM, EngineArgs, RequestOutput, SamplingParams, TokensPrompt, envs
from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.outputs import SamplingMaskLists

from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import LoraConfig, ModelConfig, RayConfig, Sampling
from rlprims.execution._columns import right_padded
from rlprims.execution._ray_config import memory_options
from rlprims.execution.hf import prompt_ids, special_ids, with_responses
from rlprims.execution.hf._adapters import save_adapter
from rlprims.execution.hf._draw import sample_seeds
from rlprims.execution.hf._families import sees
from rlprims.execution.hf._routes import routed_layers
from rlprims.execution.hf._rules import rules_of
from rlprims.execution.hf._sampling import Responses, images_of
from rlprims.execution.hf._vision import placeholders
from rlprims.execution.ray._checks import check_options, check_truncation
from rlprims.execution.ray._kept import rows_of_log_probs, rows_of_masks, sets_of
from rlprims.execution.ray._vllm_images import Pictures
from rlprims.execution.ray._vllm_worker import PREFIX, WorkerExtension
from rlprims.execution.ray._wire import Sums, differences
from rlprims.routing import UNKNOWN, align

_ENDED = {"stop": Ended.STOP, "length": Ended.LENGTH, "abort": Ended.ABORTED, "repetition": Ended.ABORTED}
"""The reasons why a response ended, by vLLM's names; the others are errors."""
_TIES = 8
"""The number of log-probs that are requested beyond ``top_k``, for tokens as likely as the k-th."""
_SCORED = "scored"
"""The id of the request that scores a text."""


class _Adapter:
    """The adapter of the engine. Before the first adapter arrives, the engine samples from the base model."""

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
        """Replace the engine's adapter by one with these tensors."""
        old, number = self.request, self.request.lora_int_id + 1 if self.request else 1
        # A new number and name, because vLLM would use the old adapter for a known one.
        path = Path(self.directory.name) / str(number)
        save_adapter(path, tensors, self.config, base=self.base)
        self.request = LoRARequest(f"adapter-{number}", number, str(path))
        if old:
            engine.remove_lora(old.lora_int_id)
            shutil.rmtree(old.lora_path)
        engine.add_lora(self.request)


class _Call(NamedTuple):
    """The prompts of one call, and the responses that are complete."""

    prompts: DataProto
    sampling: Sampling
    prompt_width: int | None
    responses: list[Any]


class VllmEngine:
    """A vLLM engine in this process. It samples the requests of all calls together, each as a local run does."""

    joins = True

    def __init__(
        self, model: ModelConfig, tokenizer: Any, cluster: RayConfig, *, context_window: int, backend: str = "gloo"
    ) -> None:
        self.pad_token_id, self.end_ids = special_ids(GenerationConfig.from_pretrained(model.path), tokenizer)
        on_cpu = current_platform.is_cpu()
        self.adapter = _Adapter(model.engine_lora, model.path) if model.engine_lora else None
        self.frees_memory = bool(current_platform.is_sleep_mode_available())
        ours = _engine_options(model, cluster) | {
            "enable_sleep_mode": cluster.colocate and self.frees_memory,  # vLLM on a CPU refuses the option
            "max_model_len": context_window,
            "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled from
            "enable_return_routed_experts": model.replay_routes,
            "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),  # as the local sampler
            "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        }
        self.routed_layers = routed_layers(model.path) if model.replay_routes else None
        if self.adapter:
            ours |= self.adapter.options()
        else:
            ours["weight_transfer_config"] = WeightTransferConfig(backend=PREFIX + backend)
        if on_cpu and not envs.VLLM_USE_V2_MODEL_RUNNER:
            # With chunked prefill, V1 (the runner for CPUs) rewinds a request's generator, which fails on a CPU.
            ours["enable_chunked_prefill"] = False
            if EngineArgs(model=model.path).create_model_config().has_inner_state:  # and vLLM caches states by chunks
                ours["enable_prefix_caching"] = False
        try:
            self.llm = LLM(**ours | cluster.engine_options)
        except ValueError as error:
            if "Model Runner V2" not in str(error):
                raise
            raise ValueError(
                "model.replay_routes: expected vLLM's model runner V2, which records experts and needs a GPU with "
                "Triton, got V1; use ray.engine: hf, or set model.replay_routes: false"
            ) from None
        if on_cpu:
            self.llm.collective_rpc("draw_as_a_gpu")
        self.pictures = Pictures(self.llm, model.path) if sees(model) else None
        self._sees_anew = model.vision == "trained"
        if self.pictures:
            self.llm.collective_rpc("ban", args=(placeholders(AutoConfig.from_pretrained(model.path)),))
        self._calls: dict[int, _Call] = {}
        self._recomputes = cluster.running_requests == "recompute"
        self.version = 0  # the version of the weights
        self.tokenizer = tokenizer
        config = self.llm.llm_engine.vllm_config
        self.vocabulary = int(config.model_config.get_vocab_size())
        # V2 can return the sets. Its option would refuse greedy requests and those without top_k, so it is not set.
        self.has_masks, self._returns_masks = config.use_v2_model_runner and not config.speculative_config, False
        if self.has_masks:
            self.llm.llm_engine.engine_core.engine_core.scheduler.return_sampling_mask = True
            SamplingMaskLists.to_nested_list = rows_of_masks

    def begin(self, call: int, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> None:
        ids = prompt_ids(prompts, prompt_width)
        seeds = sample_seeds(seed, prompts["sample_id"].tolist()).tolist()
        requests = list[str]()
        self._prepare(sampling)
        try:
            for row, (prompt, images, request_seed) in enumerate(zip(ids, images_of(prompts), seeds, strict=True)):
                ends = [] if sampling.ignore_eos else self.end_ids
                parameters = self._parameters(sampling, request_seed, ends=ends)
                requests.append(self._add(f"{call}/{row}", prompt, parameters, images))
        except BaseException:  # for example if a prompt is too long
            self.llm.llm_engine.abort_request(requests, internal=True)
            raise
        self._calls[call] = _Call(prompts, sampling, prompt_width, [None] * len(ids))

    def _add(self, name: str, tokens: list[int], parameters: SamplingParams, images: tuple[bytes, ...] = ()) -> str:
        # The salt hides cached keys and values of older weights, which stay while requests run.
        salt, lora = str(self.version), self.adapter and self.adapter.request
        if not images:
            salted = tokens_input(tokens, cache_salt=salt)
        elif self.pictures:
            salted = self.pictures(tokens, images, salt)
        else:
            raise ValueError("rows have images: expected an execution with images=True, got an engine of texts")
        return str(self.llm.llm_engine.add_request(name, salted, parameters, lora_request=lora))

    def step(self) -> dict[int, DataProto]:
        if self.llm.llm_engine.has_unfinished_requests():
            self._advance()
        complete = [number for number, call in self._calls.items() if None not in call.responses]
        return {number: self._answer(self._calls.pop(number)) for number in complete}

    def _advance(self) -> RequestOutput | None:
        """Run one step of the engine; returns the output of the request that scores a text, if it is complete."""
        scored = None
        for output in self.llm.llm_engine.step():
            if output.request_id == _SCORED:
                scored = output
                continue
            call, row = map(int, output.request_id.split("/"))
            if call in self._calls:  # otherwise the call was abandoned
                self._calls[call].responses[row] = output.outputs[0]
        return scored

    def abandon(self, call: int) -> None:
        rows = len(self._calls.pop(call).responses) if call in self._calls else 0
        self.llm.llm_engine.abort_request([f"{call}/{row}" for row in range(rows)])

    def _prepare(self, sampling: Sampling) -> None:
        """Let the runner return sets while a call truncates; a ValueError if it cannot and log-probs are too many."""
        check_options(sampling)
        running = (call.sampling for call in self._calls.values())
        if not self.has_masks:
            check_truncation(sampling, self.vocabulary)
        elif (wanted := any(x.filters for x in (sampling, *running))) != self._returns_masks:
            self.llm.collective_rpc("return_masks", args=(wanted,))
            self._returns_masks = wanted

    def _parameters(self, sampling: Sampling, request_seed: int, *, ends: list[int]) -> SamplingParams:
        # Without masks, as many log-probs as show which tokens were kept: also those as likely as the k-th.
        some = sampling.top_k + _TIES if sampling.top_k else self.vocabulary
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=request_seed,
            logprobs=min(self.vocabulary, some) if sampling.filters and not self.has_masks else 0,
            flat_logprobs=True,  # lists of numbers instead of an object for each number
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=ends,
            ignore_eos=True,  # self.end_ids has the end tokens of the generation config
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # a stop text may be a special token, as in the local sampler
            output_kind=RequestOutputKind.FINAL_ONLY,
            **_shaping(sampling),
        )

    def _answer(self, call: _Call) -> DataProto:
        sampling, limit, pad = call.sampling, call.sampling.max_new_tokens, self.pad_token_id
        flat = [response.logprobs for response in call.responses]
        tokens, mask = right_padded([response.token_ids for response in call.responses], limit, pad)
        log_probs = torch.zeros(mask.shape)
        log_probs[mask] = torch.tensor([x.logprobs[i] for x in flat for i in x.start_indices])
        ended = torch.tensor([_ended(response, limit) for response in call.responses], dtype=torch.int8)
        versions = torch.full(mask.shape, self.version)
        for i, response in enumerate(call.responses):
            for span in response.weight_versions or ():
                if span.version.isdecimal():
                    versions[i, span.start : span.end] = int(span.version)
        kept: tuple[Tensor | None, Tensor | None] = None, None
        if sampling.truncates:
            rows = list[Any]() if sampling.filters else self._ruled(call)
            for x in call.responses if sampling.filters else ():
                masks = x.sampling_mask.token_ids if x.sampling_mask else []  # None if it has no token
                rows += masks if self.has_masks else rows_of_log_probs(x.logprobs)
            kept_ids, counts = sets_of(rows, self.vocabulary)
            kept = kept_ids, torch.zeros(mask.shape, dtype=torch.int32).masked_scatter(mask, counts)
        responses = Responses(tokens, mask, log_probs, ended, *kept, self._routes(call))
        sampled = with_responses(call.prompts, responses, prompt_width=call.prompt_width, pad_token_id=pad)
        sampled["versions"] = versions
        return sampled

    def _ruled(self, call: _Call) -> list[Any]:
        """The set of each token by the rules of the sampling, row after row."""
        rules, found = rules_of(call.sampling, self.tokenizer, self.end_ids, self.vocabulary), list[Any]()
        assert rules is not None
        for prompt, response in zip(prompt_ids(call.prompts, call.prompt_width), call.responses, strict=True):
            row = rules(prompt)
            found += [np.array(row.after(token)[0], np.int32) for token in [None, *response.token_ids][:-1]]
        return found

    def _routes(self, call: _Call) -> Tensor | None:
        """The experts of each token that was read, int16 (N, L, K), row after row."""
        if self.routed_layers is None:
            return None
        shape = len(self.routed_layers), self.llm.llm_engine.model_config.get_num_experts_per_tok()
        found = [torch.zeros(0, *shape, dtype=torch.int16)]
        for prompt, response in zip(prompt_ids(call.prompts, call.prompt_width), call.responses, strict=True):
            length, record = len(prompt) + len(response.token_ids), response.routed_experts
            if record is None:  # the request was aborted before its first token
                found.append(torch.full((length - 1, *shape), UNKNOWN, dtype=torch.int16))
                continue
            every_layer = torch.from_numpy(record.astype("int16"))
            found.append(align(every_layer[:, self.routed_layers], length)[: length - 1])
        return torch.cat(found)

    def sample_plainly(self, batch: DataProto, sampling: Sampling | None) -> bool:
        if any(images_of(batch)):
            return False
        lengths = batch["response_mask"].sum(-1).tolist()
        seeds = sample_seeds(0, range(len(batch))).tolist()
        parameters = [
            SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
            if sampling is None
            else self._parameters(sampling.model_copy(update={"max_new_tokens": length}), seed, ends=[])
            for length, seed in zip(lengths, seeds, strict=True)
        ]
        self._prepare(sampling or Sampling())
        self.llm.reset_prefix_cache()  # an earlier call may have cached these prompts
        prompts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in batch["prompt_ids"]]
        lora = self.adapter and self.adapter.request
        self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=lora)
        return True

    def sleep(self, level: int) -> None:
        # Level 2 discards the base model, too, and the ranks send only the adapter.
        self.llm.sleep(level=1 if self.adapter else level)

    def wake(self) -> None:
        self.llm.wake_up()

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-prob of each token except the first, at temperature 1. Running requests continue meanwhile."""
        kind = RequestOutputKind.FINAL_ONLY
        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=kind)
        self._add(_SCORED, list(tokens), wanted)
        while (output := self._advance()) is None:
            pass
        return [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.adapter is None:
            raise ValueError("this engine receives whole weights: it has no adapter to load")
        self.adapter.renew(self.llm.llm_engine, dict(weights))
        self.llm.reset_prefix_cache()

    def open(self, info: dict[str, Any]) -> None:
        self.llm.shutdown_weight_transfer_engine()
        self.llm.init_weight_transfer_engine({"init_info": info})

    def start_update(self) -> None:
        """Pause the running requests. They continue with the new weights."""
        self.llm.sleep(level=0, mode="keep")  # schedule nothing until an update is complete
        for _ in range(self.llm.llm_engine.vllm_config.max_concurrent_batches):
            self._advance()  # collect the tokens of steps that are still in flight
        self.llm.start_weight_update()

    def update(self, info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": info})

    def finish_update(self, version: int) -> Sums:
        self.llm.finish_weight_update(str(version))
        self.version = version
        # Running requests keep their old keys and values, or lose them and compute them again with the new weights.
        self.llm.reset_prefix_cache(reset_running_requests=self._recomputes)
        if self._sees_anew:
            self.llm.llm_engine.reset_encoder_cache()
        self.llm.wake_up(tags=["scheduling"])
        received: Sums = self.llm.collective_rpc("received_sums")[0]
        return received

    def abandon_update(self) -> None:
        self.llm.collective_rpc("abandon_weight_update")

    def mismatched_tensors(self, sent: Sums) -> list[str]:
        fused = self.llm.collective_rpc("fused_names")[0]
        if self.pictures:
            names = self.llm.collective_rpc("names_of", args=(list(sent),))[0]
            sent = dict(zip(names, sent.values(), strict=True))
        return differences(sent, self.llm.collective_rpc("held_sums"), fused)


def _shaping(sampling: Sampling) -> dict[str, Any]:
    """vLLM's names of the options that read the tokens before."""
    return {
        "min_tokens": min(sampling.min_new_tokens, sampling.max_new_tokens),
        "bad_words": list(sampling.bad_words),
        "structured_outputs": sampling.structured and StructuredOutputsParams(**sampling.structured),
        **sampling.model_dump(include={"repetition_penalty", "presence_penalty", "frequency_penalty"}),
    }


def _ended(response: Any, limit: int) -> Ended:
    """Return why a response ended. vLLM reports "length" for a full context window, too."""
    if response.finish_reason == "length" and len(response.token_ids) < limit:
        return Ended.CONTEXT
    return _ENDED.get(response.finish_reason, Ended.ERROR)


def _engine_options(model: ModelConfig, cluster: RayConfig) -> dict[str, Any]:
    """The options of an engine by model, devices and memory."""
    devices, gpus = cluster.tensor_parallel_size, cluster.all_pools[cluster.roles.rollout].gpus
    options: dict[str, Any] = {
        "model": model.path,
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
