"""Graphs: ``torch.compile`` and ``torch.export`` with a dynamic batch, and shapes without values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlprims.testing._call import Call, Subject, errors_break_the_law, few_samples
from rlprims.testing._cases import TOY
from rlprims.testing._compare import assert_close

EXACT = 1e-11
WIDTH = TOY[1]
ROWS = (5, 8, 64, 130)
"""Batch sizes that share one graph. T is fixed, because a scan is specialized on the length."""

_GRADIENT = "the gradient of "

Graph = Callable[..., Any]


def one_graph_for_all_batch_sizes(subject: Subject) -> None:
    """torch.compile(fullgraph=True) of padded tokens: one graph for four batch sizes, and one for their gradients."""
    _assert_one_graph(subject, "padded", "aot_eager")


def one_graph_for_all_packed_batches(subject: Subject) -> None:
    """The same of packed tokens: N and B are dynamic."""
    _assert_one_graph(subject, "packed", "aot_eager")


def packed_tokens_compile(subject: Subject) -> None:
    """torch.compile(fullgraph=True) of packed tokens, perhaps specialized on N, with the same numbers."""
    call = subject.sample(*TOY, layout="packed")
    with _compiler("does not compile packed:"):
        got = Compiled("eager")(call)
    _assert_numbers(got, call, f"after torch.compile ({call.label})")


def inductor_changes_nothing(subject: Subject) -> None:
    """torch.compile(fullgraph=True) by its default backend, which generates code: one graph, the same numbers."""
    _assert_one_graph(subject, "padded", "inductor")


def exports_with_a_dynamic_batch(subject: Subject) -> None:
    """torch.export with a dynamic batch, padded: one program for four batch sizes, with the same values."""
    _assert_exports(subject, "padded")


def exports_packed_with_a_dynamic_batch(subject: Subject) -> None:
    """The same of packed tokens: N and B are dynamic."""
    _assert_exports(subject, "packed")


def fake_tensors_are_enough(subject: Subject) -> None:
    """Under FakeTensorMode, where tensors have no values: shape and dtype of the value and of every gradient."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for call in few_samples(subject):
        want = _numbers(call, call.fn, call.data)
        mode = FakeTensorMode()
        fake: dict[str, Tensor] = {name: mode.from_tensor(x) for name, x in call.data.items()}
        with errors_break_the_law(f"with fake tensors ({call.label}) it raised"), mode:
            got = _numbers(call, call.fn, fake)
        for what, x in want.items():
            assert isinstance(got[what], FakeTensor), f"{what} of fake tensors is a {type(got[what]).__name__}"
            found, wanted = (tuple(got[what].shape), got[what].dtype), (tuple(x.shape), x.dtype)
            assert found == wanted, f"{what} of fake tensors ({call.label}) is {found}, expected {wanted}"


class Compiled:
    """A function compiled with fullgraph=True that counts its graphs; the first dimension of data may be dynamic."""

    def __init__(self, backend: str, dynamic: bool = False) -> None:
        self.backend, self.dynamic, self.graphs = backend, dynamic, 0
        self.compiled: Graph | None = None

    def __call__(self, call: Call) -> dict[str, Tensor]:
        """The value and gradients of one call."""
        if self.compiled is None:
            torch.compiler.reset()
            self.compiled = torch.compile(call.fn, backend=self._count, fullgraph=True)
        return _numbers(call, self.compiled, call.data, self.dynamic)

    def _count(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        compiled: Graph = lookup_backend(self.backend)(graph, inputs)
        return compiled


def _assert_one_graph(subject: Subject, layout: str, backend: str) -> None:
    compiled = Compiled(backend, dynamic=True)
    with _compiler(f"does not compile in one graph ({layout}):"):
        for rows in ROWS:
            call = subject.sample(rows, WIDTH, seed=rows, layout=layout)
            _assert_numbers(compiled(call), call, f"after torch.compile ({call.label})")
            assert compiled.graphs == 1, f"{compiled.graphs} graphs up to a batch of {call.label}, expected 1"


@contextmanager
def _compiler(what: str) -> Iterator[None]:
    """The compiler, which forgets its graphs at the end."""
    try:
        with errors_break_the_law(what):
            yield
    finally:
        torch.compiler.reset()


def _numbers(
    call: Call, fn: Callable[..., Tensor], data: dict[str, Tensor], dynamic: bool = False
) -> dict[str, Tensor]:
    """The value, and the gradients of its sum, by name."""
    leaves = {name: x.detach().clone().requires_grad_(name in call.inputs) for name, x in data.items()}
    if dynamic:
        for leaf in leaves.values():
            torch._dynamo.mark_dynamic(leaf, 0)
    value = fn(**leaves, **call.hyperparameters)
    numbers = {"the value": value.detach()}
    if value.requires_grad:
        inputs = [leaves[name] for name in call.inputs]
        found = torch.autograd.grad(value, inputs, torch.ones_like(value), allow_unused=True)
        for name, gradient in zip(call.inputs, found, strict=True):
            if gradient is not None:
                numbers[_GRADIENT + name] = gradient
    return numbers


def _assert_numbers(got: dict[str, Tensor], call: Call, of: str) -> None:
    want = _numbers(call, call.fn, call.data)
    for what, x in want.items():
        # A compiled function returns zeros if autograd returns None.
        assert_close(f"{what} {of}", got.get(what, torch.zeros_like(x)), x, EXACT)
    for what in got.keys() - want.keys():
        assert_close(f"{what} {of}", got[what], torch.zeros_like(got[what]), EXACT)


class _Module(torch.nn.Module):
    """A call as a module, which ``torch.export`` needs."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        return self.call.fn(**data, **self.call.hyperparameters)


def _assert_exports(subject: Subject, layout: str) -> None:
    example = subject.sample(ROWS[1], WIDTH, layout=layout)
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in example.data}
    with errors_break_the_law(f"does not export ({layout}):"):
        exported = torch.export.export(_Module(example), (example.data,), dynamic_shapes=(dynamic,), strict=False)
        program = exported.module()
        for rows in ROWS:
            call = subject.sample(rows, WIDTH, seed=rows, layout=layout)
            assert_close(f"the value of the exported program ({call.label})", program(call.data), call(), EXACT)
