"""The contract of ``generate``: what a sample is, and what is said of it."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlprims import algorithms
from rlprims.ended import Ended
from rlprims.execution import Sampling
from tests import tiny
from tests.execution.execution_contract import LIMIT, QUESTIONS, SAMPLING, WIDTH, plain_logits, prompts, responses

ROWS = range(len(QUESTIONS))


def generate(execution, rows, sampling=SAMPLING, *, seed=0, width=WIDTH):
    return execution.generate(rows, sampling, seed=seed, prompt_width=width)


class TestASampleIsAFunctionOfSeedAndId:
    @pytest.mark.parametrize("rows", [[*ROWS], [*reversed(ROWS)], [3], [6, 1, 4], [2, 2]], ids=str)
    def test_whatever_batch_it_is_in(self, execution, sampled, rows):
        again = generate(execution, prompts([QUESTIONS[i] for i in rows], rows))
        self.assert_same(again, sampled, rows)

    @pytest.mark.parametrize("at_once", [1, 3])
    def test_however_many_are_sampled_at_once(self, fresh, one_engine, sampled, at_once):
        execution = fresh(algorithms.reinforce(), max_rows_per_generation=at_once, **one_engine)
        self.assert_same(generate(execution, prompts()), sampled, [*ROWS])

    def assert_same(self, again, sampled, rows):
        for name in ("responses", "response_mask", "ended", "prompts", "attention_mask"):
            assert torch.equal(again[name], sampled[name][rows]), name
        torch.testing.assert_close(again["rollout_log_probs"], sampled["rollout_log_probs"][rows], rtol=1e-5, atol=1e-5)

    def test_without_a_width_prompts_are_padded_to_the_longest_of_the_batch(self, execution, sampled):
        longest = max(map(len, prompts()["prompt_ids"]))
        again = generate(execution, prompts(), width=None)
        assert torch.equal(again["prompts"], sampled["prompts"][:, WIDTH - longest :])
        assert torch.equal(again["responses"], sampled["responses"])

    def test_other_ids_are_other_samples(self, execution):
        batch = generate(execution, prompts(["1+2="] * 16))
        assert len({tuple(row) for row in responses(batch)}) >= 14

    def test_another_seed_is_another_sample(self, execution, sampled):
        other = generate(execution, prompts(), seed=1)
        assert sum(a == b for a, b in zip(responses(other), responses(sampled), strict=True)) <= 1

    @pytest.mark.parametrize("limit", [1, 2, LIMIT - 1])
    def test_a_shorter_limit_gives_the_beginning(self, execution, sampled, limit):
        cut = generate(execution, prompts(), Sampling(max_new_tokens=limit))
        assert cut["responses"].shape == (len(QUESTIONS), limit)
        assert responses(cut) == [row[:limit] for row in responses(sampled)]
        lengths = sampled["response_mask"].sum(-1)
        assert torch.equal(cut["ended"] == Ended.LENGTH, (sampled["ended"] == Ended.LENGTH) | (lengths > limit))


class TestAStream:
    """Parts that are sampled independently have the rows of one batch."""

    def test_each_part_is_as_in_a_batch(self, execution, sampled):
        answers, parts = {}, {}
        with execution.stream(SAMPLING, seed=0, prompt_width=WIDTH) as stream:
            for rows in ([0, 1], [2, 3, 4]):
                parts[stream.submit(self.part(rows))] = rows
            answers |= stream.take()
            parts[stream.submit(self.part([7, 5]))] = [7, 5]  # while others may still be sampled
            while len(answers) < len(parts):
                answers |= stream.take()
            with pytest.raises(ValueError, match="that was submitted and not taken, got none"):
                stream.take()
        for number, rows in parts.items():
            assert answers[number]["sample_id"].tolist() == rows
            for name in ("responses", "response_mask", "ended", "prompts", "attention_mask", "weights_version"):
                assert torch.equal(answers[number][name], sampled[name][rows]), name
            ours, theirs = answers[number]["rollout_log_probs"], sampled["rollout_log_probs"][rows]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def test_what_is_not_taken_is_abandoned(self, execution, sampled):
        with execution.stream(SAMPLING, seed=0, prompt_width=WIDTH) as stream:
            stream.submit(self.part([0, 1]))
        again = generate(execution, prompts())
        assert torch.equal(again["responses"], sampled["responses"])

    def test_a_part_that_cannot_be_sampled_ends_the_stream_alone(self, execution, sampled):
        with execution.stream(SAMPLING, seed=0, prompt_width=WIDTH) as stream:
            stream.submit(self.part([0]))
            stream.submit(prompts(["1" * (WIDTH + 1)], [1]))
            with pytest.raises(ValueError, match=f"more than prompt_width={WIDTH}"):
                _ = [stream.take() for _ in range(2)]
        assert torch.equal(generate(execution, prompts())["responses"], sampled["responses"])

    def part(self, rows):
        return prompts([QUESTIONS[i] for i in rows], rows)


class TestEnds:
    def test_a_response_ends_at_its_first_end_of_sequence(self, sampled):
        for tokens, truncated in zip(responses(sampled), (sampled["ended"] == Ended.LENGTH).tolist(), strict=True):
            assert tiny.EOS_ID not in tokens[:-1]
            assert truncated == (tokens[-1] != tiny.EOS_ID)
            assert len(tokens) == LIMIT or not truncated

    def test_nothing_follows(self, sampled):
        mask = sampled["response_mask"]
        assert torch.equal(mask, torch.arange(LIMIT) < mask.sum(-1, keepdim=True))
        assert (sampled["responses"][~mask] == tiny.PAD_ID).all()
        assert (sampled["rollout_log_probs"][~mask] == 0).all()

    @pytest.mark.parametrize("part", [slice(5, 8), slice(LIMIT - 3, LIMIT)], ids=str)
    def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(self, execution, sampled, part):
        decode, before = tiny.tokenizer().decode, responses(sampled)
        stop = decode(max(before, key=len)[part])[:-1]  # of several tokens; a tag is left by its middle
        stopped = generate(execution, prompts(), Sampling(max_new_tokens=LIMIT, stop=("never said", stop)))
        found = 0
        for row, cut, truncated in zip(
            before, responses(stopped), (stopped["ended"] == Ended.LENGTH).tolist(), strict=True
        ):
            ends = [end for end in range(1, len(row) + 1) if stop in decode(row[:end])]
            assert cut == row[: ends[0] if ends else None]
            assert not (ends and truncated)
            found += bool(ends)
        assert found

    def test_a_stop_text_may_be_a_special_token(self, execution, sampled):
        """A pad token that is sampled; texts for rewards and tools leave special tokens out, stop texts do not."""
        stopped = responses(generate(execution, prompts(), Sampling(max_new_tokens=LIMIT, stop=(tiny.PAD,))))
        before = responses(sampled)
        assert stopped == [row[: row.index(tiny.PAD_ID) + 1] if tiny.PAD_ID in row else row for row in before]
        assert stopped != before


class TestDistribution:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_the_log_probs_are_those_of_the_sampled_tokens(self, execution, fresh, one_engine, plain, temperature):
        if temperature != 1.0:
            execution = fresh(algorithms.reinforce(), temperature=temperature, **one_engine)
        batch = generate(execution, prompts(), Sampling(max_new_tokens=LIMIT, temperature=temperature))
        rollout = batch["rollout_log_probs"]
        torch.testing.assert_close(rollout, execution.log_probs(batch), rtol=1e-5, atol=1e-5)
        for row in ROWS:
            log_probs = (plain_logits(plain, batch, row) / temperature).log_softmax(-1)
            expected = log_probs.gather(1, torch.tensor(responses(batch)[row])[:, None])[:, 0]
            torch.testing.assert_close(rollout[row, : len(expected)], expected, rtol=1e-5, atol=1e-5)

    def test_learned_positions_are_counted_from_the_prompts_first_token(self, build, one_engine, tmp_path):
        settings = GPT2Config(
            vocab_size=32,
            n_embd=64,  # heads of 32: the least that vLLM takes on a CPU
            n_layer=1,
            n_head=2,
            n_positions=64,
            initializer_range=0.5,
            eos_token_id=tiny.EOS_ID,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = GPT2LMHeadModel(settings).eval()
        model.save_pretrained(tmp_path)
        execution = build.func(tmp_path, algorithms.reinforce(), **one_engine)
        assert execution.context_window == 64
        batch = generate(execution, prompts())
        for row in ROWS:
            log_probs = plain_logits(model, batch, row).log_softmax(-1)
            expected = log_probs.gather(1, torch.tensor(responses(batch)[row])[:, None])[:, 0]
            for measured in (batch["rollout_log_probs"], execution.log_probs(batch)):
                torch.testing.assert_close(measured[row, : len(expected)], expected, rtol=1e-5, atol=2e-5)

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_frequencies_are_the_probabilities(self, execution, plain, temperature):
        count = 1024
        batch = generate(execution, prompts(["3+4="] * count), Sampling(max_new_tokens=1, temperature=temperature))
        expected = count * (plain_logits(plain, batch, 0)[0] / temperature).softmax(-1)
        seen = torch.bincount(batch["responses"][:, 0], minlength=len(expected)).float()
        often = expected >= 5
        chi_square = ((seen - expected).square() / expected)[often].sum()
        freedom = float(often.sum())
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
        assert abs(seen[~often].sum() - expected[~often].sum()) < 4 * expected[~often].sum().clamp(min=1).sqrt()

    def test_greedy_takes_the_likeliest(self, execution, plain):
        batch = generate(execution, prompts(), SAMPLING.greedy())
        for row, tokens in enumerate(responses(batch)):
            logits = plain_logits(plain, batch, row)
            assert logits.argmax(-1).tolist() == tokens
            torch.testing.assert_close(
                batch["rollout_log_probs"][row, : len(tokens)], logits.log_softmax(-1).amax(-1), rtol=1e-5, atol=1e-5
            )

    def test_greedy_knows_no_seed_and_top_k_of_one_is_greedy(self, execution):
        greedy = generate(execution, prompts(), SAMPLING.greedy())
        other = generate(execution, prompts(sample_ids=range(50, 50 + len(QUESTIONS))), SAMPLING.greedy(), seed=9)
        top = generate(execution, prompts(), Sampling(max_new_tokens=LIMIT, top_k=1))
        assert responses(greedy) == responses(other) == responses(top)

    @pytest.mark.parametrize(
        ("sampling", "allowed"),
        [
            ({"top_k": 3}, lambda p: p.topk(3).indices),
            ({"top_p": 0.6}, lambda p: nucleus(p, 0.6)),
            ({"top_p": 0.6, "temperature": 2.0}, lambda p: nucleus(p, 0.6)),
        ],
        ids=["top_k", "top_p", "top_p at a temperature"],
    )
    def test_an_excluded_token_is_never_taken(self, execution, plain, sampling, allowed):
        batch = generate(execution, prompts(), Sampling(max_new_tokens=LIMIT, **sampling))
        ranks = []
        for row, tokens in enumerate(responses(batch)):
            probabilities = (plain_logits(plain, batch, row) / sampling.get("temperature", 1.0)).softmax(-1)
            for t, (token, p) in enumerate(zip(tokens, probabilities, strict=True)):
                ids = allowed(p).tolist()
                assert token in ids
                ranks.append(ids.index(token))
                logged = batch["rollout_log_probs"][row, t]
                torch.testing.assert_close(logged, (p[token] / p[ids].sum()).log(), rtol=1e-4, atol=1e-4)
        assert len(set(ranks)) > 1  # and it is not always the likeliest


def nucleus(p, top_p):
    """The fewest tokens that hold the mass."""
    ordered = p.sort(descending=True)
    return ordered.indices[: int((ordered.values.cumsum(0) < top_p).sum()) + 1]


class TestShape:
    def test_prompts_stand_right_in_the_width_asked_for(self, sampled):
        assert sampled["prompts"].shape == (len(QUESTIONS), WIDTH)
        assert sampled["attention_mask"].shape == (len(QUESTIONS), WIDTH + LIMIT)
        for row, ids in enumerate(sampled["prompt_ids"]):
            assert sampled["prompts"][row].tolist() == [tiny.PAD_ID] * (WIDTH - len(ids)) + ids
            attended = [False] * (WIDTH - len(ids)) + [True] * len(ids)
            assert sampled["attention_mask"][row].tolist() == attended + sampled["response_mask"][row].tolist()

    def test_the_width_does_not_touch_the_responses(self, execution, sampled):
        wide = generate(execution, prompts(), width=WIDTH + 7)
        assert wide["prompts"].shape[1] == WIDTH + 7
        assert torch.equal(wide["responses"], sampled["responses"])

    def test_a_prompt_wider_than_the_width_is_not_cut(self, execution):
        with pytest.raises(ValueError, match="prompt_width=4"):
            generate(execution, prompts(["1+2+3="]), width=4)

    def test_dtypes(self, sampled):
        dtypes = {name: str(tensor.dtype) for name, tensor in sampled.batch.items()}
        assert dtypes == {
            "sample_id": "torch.int64",
            "prompts": "torch.int64",
            "responses": "torch.int64",
            "attention_mask": "torch.bool",
            "response_mask": "torch.bool",
            "rollout_log_probs": "torch.float32",
            "ended": "torch.int8",
            "weights_version": "torch.int64",
        }

    def test_the_prompts_rows_come_back_and_are_not_written_into(self, execution):
        rows = prompts()
        batch = generate(execution, rows)
        assert batch["sample_id"].tolist() == list(ROWS)
        assert list(batch["prompt_ids"]) == list(rows["prompt_ids"])
        assert "responses" not in rows

    def test_no_rows(self, execution):
        batch = generate(execution, prompts([]))
        assert batch["responses"].shape == (0, LIMIT)
        assert batch["prompts"].shape == (0, WIDTH)
        assert execution.log_probs(batch).shape == (0, LIMIT)

    def test_an_execution_has_the_pad_token_and_context_window(self, execution):
        assert execution.pad_token_id == tiny.PAD_ID
        assert execution.context_window == 128
