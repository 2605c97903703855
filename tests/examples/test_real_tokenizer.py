"""A run with a real chat template and a byte-level tokenizer: which tokens are prompt, response, end, and text.

The tokenizer is SmolLM2's. The model beside it is a Llama of a few numbers that draws from a short list of tokens: the
end of a message, the beginning of one, numbers, and the pieces of a character of four bytes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlprims.cli import main
from rlprims.doctor.installation import check_end_tokens
from rlprims.ended import Ended
from rlprims.trainer.data import DataConfig, load_examples
from tests import tiny

pytestmark = pytest.mark.slow

END, BEGIN = "<|im_end|>", "<|im_start|>"
PARTY = "🎉"


@pytest.fixture(scope="module")
def tokenizer(smollm: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm)


def drawing_model(tokenizer: Any, tokens: list[int]) -> LlamaForCausalLM:
    """It draws each of the tokens with the same probability, whatever stands before, and others hardly ever."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()  # the last hidden state is a vector of ones
        model.lm_head.weight[tokens] = 30.0 / config.hidden_size
    return model


@pytest.fixture(scope="module")
def run(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps; the rollouts are of every sample."""
    folder = tmp_path_factory.mktemp("drawn")
    pieces = tokenizer.encode(PARTY, add_special_tokens=False)
    assert len(pieces) > 1, "a character of several tokens"
    said = [*pieces, *tokenizer.encode(" 16", add_special_tokens=False)]
    drawing_model(tokenizer, [*said, *tokenizer.convert_tokens_to_ids([END, BEGIN])]).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    questions = tiny.write_jsonl(
        folder / "q.jsonl", [{"question": f"What is {a} + 7?", "answer": str(a + 7)} for a in range(9)]
    )
    settings = [f"run_dir={folder / 'run'}", f"model.path={folder / 'model'}", f"data.train={questions}"]
    settings += ["data.eval=null", "steps=2", "sampling.max_new_tokens=6", "model.lora=null", "checkpoint.every=2"]
    example = Path(__file__).parents[2] / "examples" / "smollm" / "grpo.yaml"
    assert main(["train", str(example), *settings, "threads=1"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(run.glob("rollouts/*.jsonl")) for line in file.read_text().splitlines()]


def test_the_folder_agrees_with_itself_about_the_end(smollm: Path, tokenizer: Any) -> None:
    assert (check_end_tokens(str(smollm)).ok, tokenizer.eos_token, tokenizer.pad_token) == (True, END, END)
    config = json.loads((smollm / "generation_config.json").read_text())
    assert config["eos_token_id"] == config["pad_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize("system", [None, "Answer in one word: größer, 更大 or 🎉."])
def test_prompt_ids_are_those_of_apply_chat_template(tokenizer: Any, tmp_path: Path, system: str | None) -> None:
    asked = [
        "What is 7 + 8?",
        " leading and trailing spaces \n",
        "Größe, 大小, 👩‍👩‍👧, ½",
        "<|im_end|> typed by a user",
    ]
    path = tiny.write_jsonl(tmp_path / "asked.jsonl", [{"question": text, "answer": "1"} for text in asked])
    config = DataConfig(train=path, template="chat", system=system)
    rows = load_examples(path, config, tokenizer, max_prompt_length=1000).rows
    for text, row in zip(asked, rows, strict=True):
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert row.prompt_ids == wanted


def test_prompt_and_response_are_the_whole_conversation_once(
    tokenizer: Any, rollouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tiny.write_jsonl(tmp_path / "one.jsonl", [{"question": "What is 7 + 8?", "answer": "15"}])
    (row,) = load_examples(path, DataConfig(train=path, template="chat"), tokenizer, max_prompt_length=1000).rows
    talk = [{"role": "user", "content": "What is 7 + 8?"}, {"role": "assistant", "content": "7 + 8 = 15"}]
    whole = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    said = tokenizer.encode("7 + 8 = 15", add_special_tokens=False)
    after = [tokenizer.eos_token_id, *tokenizer.encode("\n", add_special_tokens=False)]
    assert whole == [*row.prompt_ids, *said, *after]
    for line in rollouts:
        text = tokenizer.decode(line["prompt_ids"] + line["response_ids"])
        assert text == line["prompt"] + tokenizer.decode(line["response_ids"])


def test_the_end_of_a_message_ends_a_response_and_nothing_else_does(
    tokenizer: Any, rollouts: list[dict[str, Any]]
) -> None:
    end = tokenizer.eos_token_id
    reasons = {line["ended"] for line in rollouts}
    assert reasons == {Ended.STOP.label, Ended.LENGTH.label}
    for line in rollouts:
        ids = line["response_ids"]
        assert end not in ids[:-1]
        assert (ids[-1] == end) == (line["ended"] == Ended.STOP.label)
        assert len(ids) == 6 or ids[-1] == end
        assert len(ids) == len(line["rollout_log_probs"]) == len(line["advantages"])
    begin = tokenizer.convert_tokens_to_ids(BEGIN)
    assert any(begin in line["response_ids"][:-1] for line in rollouts)


def test_no_special_token_is_in_the_text_that_the_verifier_reads(
    tokenizer: Any, rollouts: list[dict[str, Any]]
) -> None:
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    assert END in special
    assert not [line["response"] for line in rollouts if any(token in line["response"] for token in special)]


def test_a_response_that_is_cut_within_a_character_is_its_tokens(
    tokenizer: Any, rollouts: list[dict[str, Any]]
) -> None:
    cut = [line for line in rollouts if line["response"].endswith("\ufffd")]
    assert cut, "some responses end within a character"
    for line in cut:
        assert tokenizer.encode(line["response"], add_special_tokens=False) != line["response_ids"]
        assert tokenizer.decode(line["response_ids"], skip_special_tokens=True) == line["response"]
    whole = [line for line in rollouts if PARTY in line["response"]]
    assert all(line["score"] is not None for line in [*cut, *whole])


def test_the_policy_that_a_run_saved_loads_with_the_same_tokenizer(tokenizer: Any, run: Path) -> None:
    saved = run / "checkpoints" / "step_000002" / "policy"
    again = AutoTokenizer.from_pretrained(saved)
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert again.chat_template == tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.eos_token_id == tokenizer.eos_token_id
