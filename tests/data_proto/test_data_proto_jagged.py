"""Jagged columns do what a list of tensors does, also with holes, inner dimensions and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.data_proto import DataProto

LENGTHS = [3, 0, 2, 1]


def columns():
    values = torch.arange(6.0)
    offsets = torch.tensor([0, 3, 3, 5, 6])
    build = torch.nested.nested_tensor_from_jagged
    spaced = torch.arange(12.0)
    return {
        "plain": build(values, offsets),
        "int32": build(values.int(), offsets.int()),
        "inner": build(torch.arange(12.0).view(6, 2), offsets),
        "outer": build(torch.arange(12.0).view(2, 6), offsets, jagged_dim=2),
        "holes": build(spaced, torch.tensor([0, 4, 5, 9, 12]), torch.tensor(LENGTHS)),
        "long": build(torch.arange(1000.0), torch.tensor([0, 500, 500, 700, 1000])),
    }


def pieces(nested):
    return [piece.tolist() for piece in nested.unbind()]


@pytest.fixture(params=columns())
def column(request):
    return columns()[request.param]


def test_rows_slices_gathers_joins(column):
    data, rows = DataProto.from_dict({"x": column}), pieces(column)
    assert len(data) == 4
    assert [item["x"].tolist() for item in data] == rows
    assert pieces(data[1:3]["x"]) == rows[1:3]
    assert pieces(data[1:3][1:]["x"]) == rows[2:3]
    assert pieces(data[[3, 0, 0, 1]]["x"]) == [rows[3], rows[0], rows[0], rows[1]]
    assert pieces(data.repeat(2)["x"]) == [row for row in rows for _ in range(2)]
    assert pieces(DataProto.concat(data.chunk(2))["x"]) == rows
    assert pieces(DataProto.concat([data[2:], data[:2]])["x"]) == rows[2:] + rows[:2]
    assert pieces(data.to("cpu")["x"]) == rows
    assert len(data[:0]) == 0
    assert len(data[[]]["x"].unbind()) == 0
    assert pieces(DataProto.concat([data[:0], data[2:]])["x"]) == rows[2:]
    for child in (data[1:3], data[[3, 1]], data.repeat(2), DataProto.concat([data, data])):
        assert child["x"].dtype == column.dtype
        assert child["x"].layout == torch.jagged


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=8), data=st.data())
def test_any_gather(lengths, data):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = DataProto.from_dict({"x": torch.nested.nested_tensor_from_jagged(torch.arange(sum(lengths)), offsets)})
    numbers = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    rows = pieces(batch["x"])
    assert pieces(batch[numbers]["x"]) == [rows[number] for number in numbers]


def test_gradients_reach_the_values():
    for length in (2, 300):
        values = torch.ones(length * 3, requires_grad=True)
        offsets = torch.arange(0, length * 3 + 1, length)
        data = DataProto.from_dict({"x": torch.nested.nested_tensor_from_jagged(values, offsets)})
        DataProto.concat([data[[2, 0]], data[:1]])["x"].values().sum().backward()
        assert values.grad.view(3, length).sum(1).tolist() == [2 * length, 0, length]


def test_joining_needs_the_same_inner_shape():
    wide, narrow = (torch.nested.nested_tensor([torch.zeros(2, n)], layout=torch.jagged) for n in (3, 4))
    with pytest.raises(ValueError, match="rows of x have different shapes"):
        DataProto.concat([DataProto.from_dict({"x": wide}), DataProto.from_dict({"x": narrow})])
    with pytest.raises(ValueError, match="x has different kinds"):
        DataProto.concat([DataProto.from_dict({"x": wide}), DataProto.from_dict({"x": torch.zeros(1, 2, 3)})])
