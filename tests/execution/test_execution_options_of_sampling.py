"""The table of docs/trainer.md#sampling: with each option that it allows the trainer scores what was drawn from."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlprims import algorithms
from rlprims.ended import Ended
from rlprims.execution import EvaluatedSampling, ModelConfig, RayConfig, Sampling, kept_of
from rlprims.execution.hf._rules import penalized
from tests import tiny
from tests.execution.execution_contract import LIMIT, QUESTIONS, WIDTH, cluster, local, prompts

DIGITS = tiny.tokenizer().encode("0123456789")
FORMS = {
    "json": {"type": "integer"},
    "regex": "[0-9]{2,4}=[a-d]+",
    "grammar": 'start: ("a" | "b")+ "=" DIGIT\nDIGIT: /[0-9]/',
}
MEANT = {"regex": FORMS["regex"], "grammar": "[ab]+=[0-9]"}
MARKS = ("<answer>", "</answer>")
OPTIONS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "min_new_tokens": {"min_new_tokens": 20},
    "ignore_eos": {"ignore_eos": True},
    "bad_words": {"bad_words": ("1", "ab", "2", "3", "c")},
    "structured": {"structured": {"regex": FORMS["regex"]}},
    "thinking_budget": {"thinking_budget": 3, "thinking_marks": MARKS},
    "logits_processors": {"logits_processors": [{"fn": "tests.execution.processors.without", "ids": DIGITS}]},
}
REFUSED = ("thinking_budget", "logits_processors")  # by vLLM
TOGETHER = {"top_k": 9, "top_p": 0.95, "min_new_tokens": 20, "bad_words": ("1", "ab"), "temperature": 0.8}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
THINKING = [*QUESTIONS[:6], "1+2=<answer>", "<answer>12"]


def bytes_of_tiny():
    """The tiny tokenizer with the decoder of bytes that most models have, and grammars need."""
    words = {"Ġ" if token == " " else token: number for number, token in enumerate(tiny.VOCABULARY)}
    model = Tokenizer(WordLevel(words, unk_token=tiny.UNKNOWN))
    split = pre_tokenizers.Split(Regex("</?[a-z]+>|."), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer, model.decoder = pre_tokenizers.Sequence([split, in_bytes]), decoders.ByteLevel()
    special = {"pad_token": tiny.PAD, "eos_token": tiny.EOS, "unk_token": tiny.UNKNOWN, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False, **special)


def generate(execution, kind=Sampling, texts=QUESTIONS, **options):
    sampling = kind(**{"max_new_tokens": LIMIT, **options})
    return execution.generate(prompts(texts), sampling, seed=0, prompt_width=WIDTH)


def attended(batch):
    return batch["attention_mask"][:, WIDTH:].bool()


def texts_of(batch):
    return [tiny.tokenizer().decode(x[m]) for x, m in zip(batch["responses"], attended(batch), strict=True)]


def check_ratio(execution, batch):
    mask = batch["response_mask"]
    torch.testing.assert_close(execution.log_probs(batch)[mask], batch["rollout_log_probs"][mask], rtol=0, atol=1e-5)
    allowed = kept_of(batch)
    if allowed is not None:
        assert allowed.contains(batch["responses"].flatten())[mask.flatten()].all()


def check_meaning(name, batch):
    """What the option says of the responses."""
    lengths, ended = attended(batch).sum(-1), batch["ended"]
    if name == "min_new_tokens":
        assert lengths.min() >= 20
        assert (ended == Ended.STOP).any()
    if name == "ignore_eos":
        assert (lengths == LIMIT).all()
        assert (ended == Ended.LENGTH).all()
        assert (batch["responses"] == tiny.EOS_ID).any()
    for text in texts_of(batch):
        if name == "bad_words":
            assert not re.search("ab|[123c]", text)
        if name == "logits_processors":
            assert not re.search("[0-9]", text)
        if name == "structured":
            done = text.endswith(tiny.EOS)
            assert re.fullmatch(FORMS["regex"], text.removesuffix(tiny.EOS)) or (not done and len(text) >= LIMIT)


def check_thinking(batch, budget=3):
    """At most so many tokens between the marks; what was forced, and nothing else, is outside the mask."""
    start, end = (tiny.tokenizer().encode(mark) for mark in MARKS)
    number = 0
    for prompt, response, own, there in zip(
        batch["prompt_ids"], batch["responses"].tolist(), batch["response_mask"], attended(batch), strict=True
    ):
        since, row = None, [*prompt, *response[: int(there.sum())]]
        for place, token in enumerate(row):
            must = since is not None and place - since >= max(budget, len(prompt) - since)
            if place >= len(prompt):
                assert (token == end[0]) if must else True
                assert bool(own[place - len(prompt)]) != must
                number += must
            since = None if token == end[0] else place + 1 if token == start[0] and since is None else since
    assert number >= 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "tokenizer", bytes_of_tiny)
        yield tiny.save_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def here(path):
    return local(path, algorithms.reinforce())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_ratio_is_one(here, name):
    batch = generate(here, texts=THINKING if name == "thinking_budget" else QUESTIONS, **OPTIONS[name])
    check_ratio(here, batch)
    check_meaning(name, batch)
    if name == "thinking_budget":
        check_thinking(batch)


def test_several_at_once(path):
    execution = local(path, algorithms.reinforce(), temperature=0.8)
    batch = generate(execution, **TOGETHER)
    check_ratio(execution, batch)
    assert attended(batch).sum(-1).min() >= 20
    assert not any(re.search("1|ab", text) for text in texts_of(batch))


def test_the_docs_say_so():
    text = (Path(__file__).parents[2] / "docs/trainer.md").read_text()
    table = text.partition("| option | `execution: local` |")[2].partition("\n\n")[0]
    rows = [(re.findall(r"`(\w+)`", line.split("|")[1]), line.split("|")[4]) for line in table.splitlines()[2:]]
    assert {n for names, ratio in rows if ratio.startswith(" 1") for n in names} == {*OPTIONS, "temperature", "stop"}
    assert {n for names, ratio in rows if ratio.startswith(" not 1") for n in names} == {*PENALTIES}


@pytest.mark.parametrize("kind", FORMS)
def test_forms(here, kind):
    batch = generate(here, structured={kind: FORMS[kind]})
    check_ratio(here, batch)
    whole = [t.removesuffix(tiny.EOS) for t in texts_of(batch) if t.endswith(tiny.EOS)]
    assert whole
    for text in whole:
        assert isinstance(json.loads(text), int) if kind == "json" else re.fullmatch(MEANT[kind], text)


def test_penalties_by_hand():
    """Repetition: of prompt and response, z / 2 or 2 z; presence 0.5 and frequency 0.25 of the response."""
    logits = torch.tensor([1.0, 2.0, -1.0, 4.0, 0.5])
    how = EvaluatedSampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert penalized(logits, [1, 2, 3, 3], [3, 3], how).tolist() == [1.0, 1.0, -2.0, 2.0 - 0.5 - 2 * 0.25, 0.5]


def test_a_processor_that_changes_a_logit_is_for_evaluation(here):
    """It stops at the step, in one line; with EvaluatedSampling it is used."""
    options = {"logits_processors": [{"fn": "tests.execution.processors.added", "ids": [12], "bias": 40.0}]}
    with pytest.raises(ValueError, match=r"processors.added changed a finite logit at token 0: for training") as error:
        generate(here, **options)
    assert "\n" not in str(error.value)
    batch = generate(here, EvaluatedSampling, **options)
    assert (batch["responses"] == 12).all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_has_not_is_refused_before_it_starts(path, name):
    pytest.importorskip("ray")
    from rlprims.execution.ray._checks import check

    run = {
        "algorithm": algorithms.reinforce(),
        "temperature": 1.0,
        "updates": 1,
        "sampling": (Sampling(**OPTIONS[name]),),
    }
    model = ModelConfig(path=str(path), device="cpu")
    with pytest.raises(ValueError, match="vLLM calls no logits_processors of ours, and counts") as error:
        check(RayConfig(), model, run)
    assert "\n" not in str(error.value)
    check(RayConfig(engine="hf"), model, run)


@pytest.mark.ray
def test_vllm_draws_the_same(path, here):
    """Tokens and log-probs of each option are those of the local sampler, and the ratio is 1."""
    execution = cluster(path, algorithms.reinforce(), engine="vllm")
    try:
        cases = {k: v for k, v in OPTIONS.items() if k not in REFUSED} | {"penalties": PENALTIES}
        cases |= {kind: {"structured": {kind: form}} for kind, form in FORMS.items()}
        for name, options in cases.items():
            theirs, ours = (generate(each, EvaluatedSampling, **options) for each in (execution, here))
            for column in ("responses", "response_mask", "attention_mask", "ended"):
                assert theirs[column].tolist() == ours[column].tolist(), (name, column)
            close = {"rtol": 0, "atol": 1e-4, "msg": name}
            torch.testing.assert_close(theirs["rollout_log_probs"], ours["rollout_log_probs"], **close)
            if name != "penalties":
                check_ratio(execution, theirs)
    finally:
        execution.close()
