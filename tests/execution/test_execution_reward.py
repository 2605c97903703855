"""The contract of ``reward_scores``: the classifier's logit at a response's last token, whatever is beside it.

Loading and tokens are the same code wherever it runs, and are tried locally.
"""

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from rlprims import algorithms
from tests import tiny
from tests.execution.execution_contract import local, responses, widened

CHAT = "{% for m in messages %}{{ 'b' if m['role'] == 'user' else 'c' }}{{ m['content'] + '=' }}{% endfor %}"


@pytest.fixture(scope="session")
def reward_path(tmp_path_factory):
    """Its padding is its end of sequence, as in many reward models: a response's last token is one."""
    return tiny.save_classifier(tmp_path_factory.mktemp("reward"), seed=3, pad_token_id=tiny.EOS_ID)


@pytest.fixture(scope="module")
def rewarding(build, reward_path, without_engines):
    return build(algorithms.reinforce(), reward=str(reward_path), **without_engines)


def alone(path, tokens):
    """The score of one row without padding or library: the head on the last hidden state."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model.score(model.model(torch.tensor([tokens])).last_hidden_state[0, -1]))


def test_is_the_heads_number_at_the_last_token(rewarding, sampled, reward_path):
    scores = rewarding.reward_scores(sampled)
    rows = [[*p, *r] for p, r in zip(sampled["prompt_ids"], responses(sampled), strict=True)]
    assert {row[-1] for row in rows} > {tiny.EOS_ID}
    assert scores.shape == (len(sampled),)
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    torch.testing.assert_close(scores, torch.tensor([alone(reward_path, row) for row in rows]), rtol=1e-5, atol=1e-5)
    assert scores.std() > 0.1


def test_belongs_to_the_row(rewarding, sampled):
    whole = rewarding.reward_scores(sampled)
    assert_same(rewarding.reward_scores(widened(sampled, left=5, right=3, token=9)), whole)
    assert_same(rewarding.reward_scores(sampled.select_idxs([5, 0, 3])), whole[[5, 0, 3]])


def test_micro_batches_do_not_change_it(build, rewarding, sampled, reward_path, without_engines):
    options = {"reward": str(reward_path), "max_tokens_per_micro_batch": 50, **without_engines}
    small = build(algorithms.reinforce(), **options)
    assert_same(small.reward_scores(sampled), rewarding.reward_scores(sampled))


def texts(questions, answers):
    from rlprims.data_proto import DataProto

    tensors = {"prompts": torch.zeros(len(questions), 1, dtype=torch.int64)}
    tensors |= {"responses": tensors["prompts"], "response_mask": torch.zeros(len(questions), 1, dtype=torch.bool)}
    tensors["attention_mask"] = torch.ones(len(questions), 2, dtype=torch.bool)
    columns = {"question": np.array(questions, dtype=object), "response": np.array(answers, dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


@pytest.fixture(scope="session")
def other_path(tmp_path_factory):
    """A reward model of another vocabulary, with a chat template and a window of 32 tokens."""
    path = tiny.save_classifier(tmp_path_factory.mktemp("other"), seed=4, max_position_embeddings=32)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["abc"])  # id 32: outside the embedding, and no text here has it
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("template", "read"),
    [("chat", "b{q}=c{r}="), ("{question} {response}", "{q} {r}"), ("{response}", "{r}")],
)
def test_a_template_gives_it_the_texts_in_its_own_tokens(model_path, other_path, template, read):
    execution = local(model_path, algorithms.reinforce(), reward=str(other_path), reward_template=template)
    pairs = [("1+2=", "3"), ("7", ""), ("4+5=?", "<answer>9</answer>")]
    scores = execution.reward_scores(texts(*zip(*pairs, strict=True)))
    tokenizer = AutoTokenizer.from_pretrained(other_path)
    rows = [tokenizer.encode(read.format(q=q, r=r)) for q, r in pairs]
    for score, row in zip(scores.tolist(), rows, strict=True):
        assert score == pytest.approx(alone(other_path, row), abs=1e-5) if row else np.isnan(score)


def test_a_template_begins_and_ends_as_the_tokenizer_does_once(model_path, tmp_path):
    path = tiny.save_classifier(tmp_path / "framed", seed=4)
    tokenizer = tiny.tokenizer()
    frame = [("b", tokenizer.convert_tokens_to_ids("b")), ("<eos>", tiny.EOS_ID)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="b $A <eos>", special_tokens=frame)
    tokenizer.save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).encode("1") == [frame[0][1], *tiny.tokenizer().encode("1"), tiny.EOS_ID]
    expected = alone(path, tiny.tokenizer().encode("b1+2=3<eos>"))
    for template in ("{question}{response}", "b{question}{response}", "b{question}{response}<eos>"):
        execution = local(model_path, algorithms.reinforce(), reward=str(path), reward_template=template)
        assert float(execution.reward_scores(texts(["1+2="], ["3"]))) == pytest.approx(expected, abs=1e-5), template


def test_a_question_may_look_like_a_template(model_path, other_path):
    execution = local(
        model_path, algorithms.reinforce(), reward=str(other_path), reward_template="{question}{response}"
    )
    question, answer = "1{response}2", "34"
    expected = alone(other_path, AutoTokenizer.from_pretrained(other_path).encode(question + answer))
    assert float(execution.reward_scores(texts([question], [answer]))) == pytest.approx(expected, abs=1e-5)


def test_a_text_beyond_the_window_has_no_score_and_costs_no_other(model_path, other_path):
    execution = local(model_path, algorithms.reinforce(), reward=str(other_path), reward_template="{response}")
    scores = execution.reward_scores(texts(["", "", ""], ["1" * 32, "1" * 33, "2"]))
    assert scores.isnan().tolist() == [False, True, False]


class TestModelsThatCannotBeUsed:
    def test_another_vocabulary_and_no_template(self, model_path, other_path):
        with pytest.raises(ValueError, match=r"another vocabulary.*model\.reward_template: chat"):
            local(model_path, algorithms.reinforce(), reward=str(other_path))

    def test_no_head(self, model_path):
        with pytest.raises(ValueError, match=r"score\.weight.*sequence classifier"):
            local(model_path, algorithms.reinforce(), reward=str(model_path))

    def test_two_labels(self, model_path, tmp_path):
        with pytest.raises(ValueError, match="has 2 labels, and a reward model has one"):
            local(model_path, algorithms.reinforce(), reward=str(tiny.save_classifier(tmp_path, labels=2)))

    def test_an_encoder(self, model_path, tmp_path):
        settings = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=1, **settings)).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="BertForSequenceClassification: only decoders"):
            local(model_path, algorithms.reinforce(), reward=str(tmp_path))

    def test_none_was_asked_for(self, model_path, sampled):
        with pytest.raises(ValueError, match=r"no reward model was loaded: set model\.reward"):
            local(model_path, algorithms.reinforce()).reward_scores(sampled)


def test_the_reward_model_is_no_part_of_a_checkpoint(rewarding, tmp_path):
    rewarding.save(tmp_path)()
    assert not any("reward" in path.name for path in tmp_path.iterdir())


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
