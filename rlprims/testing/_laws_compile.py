"""Graphs: ``torch.compile`` and ``torch.export`` with a dynamic batch, and shapes without values."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlprims.testing._call import Call, errors_break_the_law
from rlprims.testing._cases import TOY
from rlprims.testing._compare import assert_close
from rlprims.testing._primitive import Primitive

EXACT = 1e-11
WIDTH = TOY[1]
ROWS = (5, 8, 64, 130)
"""Batch sizes that share one graph. T is fixed, because a scan is specialized on the length."""


def one_graph_for_all_batch_sizes(p: Primitive) -> None:
    """torch.compile(fullgraph=True) of padded tokens: one graph for four batch sizes, and one for their gradients."""
    _assert_one_graph(p, "padded", "aot_eager")


def one_graph_for_all_packed_batches(p: Primitive) -> None:
    """The same of packed tokens: N and B are dynamic."""
    _assert_one_graph(p, "packed", "aot_eager")


def packed_tokens_compile(p: Primitive) -> None:
    """torch.compile(fullgraph=True) of packed tokens, perhaps specialized on N, with the same numbers."""
    call = p.sample(*TOY, layout="packed")
    with _compiler("does not compile packed:"):
        _assert_numbers(call.numbers(torch.compile(p.fn, backend="eager", fullgraph=True)), call)


def inductor_changes_nothing(p: Primitive) -> None:
    """torch.compile(fullgraph=True) by its default backend, which generates code: one graph, the same numbers."""
    _assert_one_graph(p, "padded", "inductor")


def exports_with_a_dynamic_batch(p: Primitive) -> None:
    """torch.export with a dynamic batch, padded: one program for four batch sizes, with the same values."""
    _assert_exports(p, "padded")


def exports_packed_with_a_dynamic_batch(p: Primitive) -> None:
    """The same of packed tokens: N and B are dynamic."""
    _assert_exports(p, "packed")


def fake_tensors_are_enough(p: Primitive) -> None:
    """Under FakeTensorMode, where tensors have no values: shape and dtype of the value and of every gradient."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for call in p.few_samples():
        want = call.numbers()
        mode = FakeTensorMode()
        fake: dict[str, Tensor] = {name: mode.from_tensor(x) for name, x in call.data.items()}
        with errors_break_the_law(f"with fake tensors ({call.label}) it raised"), mode:
            got = call.numbers(data=fake)
        for what, x in want.items():
            assert isinstance(got[what], FakeTensor), f"{what} of fake tensors is a {type(got[what]).__name__}"
            found, wanted = (tuple(got[what].shape), got[what].dtype), (tuple(x.shape), x.dtype)
            assert found == wanted, f"{what} of fake tensors ({call.label}) is {found}, expected {wanted}"


def _assert_one_graph(p: Primitive, layout: str, backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    with _compiler(f"does not compile in one graph ({layout}):"):
        compiled = torch.compile(p.fn, backend=counter, fullgraph=True)
        for rows in ROWS:
            call = p.sample(rows, WIDTH, seed=rows, layout=layout)
            _assert_numbers(call.numbers(compiled, dynamic=True), call)
            assert counter.frame_count == 1, f"{counter.frame_count} graphs up to a batch of {call.label}, expected 1"


@contextmanager
def _compiler(what: str) -> Iterator[None]:
    """The compiler without earlier graphs, which it forgets again at the end."""
    torch.compiler.reset()
    try:
        with errors_break_the_law(what):
            yield
    finally:
        torch.compiler.reset()


def _assert_numbers(got: dict[str, Tensor], call: Call) -> None:
    for what, x in call.numbers().items():
        assert_close(f"{what} after torch.compile ({call.label})", got[what], x, EXACT)


class _Module(torch.nn.Module):
    """A call as a module, which ``torch.export`` needs."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        return self.call.fn(**data, **self.call.hyperparameters)


def _assert_exports(p: Primitive, layout: str) -> None:
    example = p.sample(ROWS[1], WIDTH, layout=layout)
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in example.data}
    with errors_break_the_law(f"does not export ({layout}):"):
        exported = torch.export.export(_Module(example), (example.data,), dynamic_shapes=(dynamic,), strict=False)
        program = exported.module()
        for rows in ROWS:
            call = p.sample(rows, WIDTH, seed=rows, layout=layout)
            assert_close(f"the value of the exported program ({call.label})", program(call.data), call(), EXACT)
