"""Sampling until the batch is full: nothing is lost, nothing out of order, and the end is said clearly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlprims.filters import DynamicSampling, SamplingExhausted


def test_the_surplus_opens_the_next_batch_in_order() -> None:
    sampling: DynamicSampling[str] = DynamicSampling(groups=2)
    sampling.add(["a", "b", "c", "d", "e"], [None, "flat", None, None, None])
    assert sampling.take() == ["a", "c"]
    assert sampling.surplus == ["d", "e"]
    assert sampling.take() == ["d", "e"]
    assert not sampling.full


def test_several_generation_batches_fill_one() -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=3)
    for batch in ([1, 2], [3, 4], [5, 6]):
        assert not sampling.full
        sampling.add(batch, [None, "flat"])
    assert sampling.full
    assert sampling.generation_batches == 3
    assert sampling.take() == [1, 3, 5]
    assert sampling.generation_batches == 0


def test_the_limit_says_what_was_seen() -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=4, max_generation_batches=2)
    sampling.add([1, 2, 3], ["all right", "all right", None])
    sampling.add([4, 5, 6], ["all right", "all wrong", "NaN score"])
    with pytest.raises(SamplingExhausted) as caught:
        _ = sampling.full
    message = str(caught.value)
    assert "1 of 4 groups after 2 generation batches, the limit" in message
    assert "Of 6 groups sampled: 3 dropped: all right; 1 dropped: all wrong; 1 dropped: NaN score" in message
    assert "max_generation_batches" in message


def test_a_full_batch_at_the_limit_is_not_an_error() -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=1, max_generation_batches=1)
    sampling.add([7], [None])
    assert sampling.take() == [7]


def test_a_smaller_batch_at_the_limit() -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=3, max_generation_batches=2, at_limit="smaller_batch")
    sampling.add([1, 2], [None, "flat"])
    assert not sampling.full
    sampling.add([3, 4], ["flat", "flat"])
    assert sampling.full
    assert sampling.take() == [1]


def test_a_smaller_batch_of_nothing_is_still_an_error() -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=3, max_generation_batches=1, at_limit="smaller_batch")
    sampling.add([1], ["flat"])
    with pytest.raises(SamplingExhausted, match="0 of 3"):
        _ = sampling.full


def test_the_counters_begin_anew() -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=1, max_generation_batches=1)
    for group in range(3):
        sampling.add([group], [None])
        assert sampling.take() == [group]
    assert (sampling.sampled, sampling.generation_batches, dict(sampling.dropped)) == (0, 0, {})


def test_taking_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match="0 of 2 groups"):
        DynamicSampling(groups=2).take()


@pytest.mark.parametrize("reasons", [1, 3])
def test_reasons_must_match_the_groups(reasons: int) -> None:
    with pytest.raises(ValueError, match=f"2 groups but {reasons} reasons"):
        DynamicSampling(groups=2).add([1, 2], [None] * reasons)


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"groups": 1, "max_generation_batches": 0}])
def test_sizes_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DynamicSampling(**wrong)


@given(st.integers(1, 5), st.lists(st.lists(st.booleans(), max_size=8), max_size=12))
def test_dynamic_sampling_takes_keeps_or_counts_every_group(size: int, batches: list[list[bool]]) -> None:
    sampling: DynamicSampling[int] = DynamicSampling(groups=size)
    taken: list[int] = []
    dropped = sampled = 0
    for batch in batches:
        groups = list(range(sampled, sampled + len(batch)))
        sampled += len(batch)
        sampling.add(groups, [None if keep else "flat" for keep in batch])
        while sampling.full:
            dropped += sampling.dropped.total()
            got = sampling.take()
            assert len(got) == size
            taken += got
    assert len(taken) + len(sampling.surplus) + dropped + sampling.dropped.total() == sampled
    assert taken + sampling.surplus == sorted(taken + sampling.surplus)
