"""Each kernel gives the numbers and the gradients of its formula, on every device at hand."""

import pytest
import torch

from rlprims import logprobs
from rlprims.kernels import ACCELERATED, check

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KERNELS = [
    pytest.param(name, module, device, id=f"{name}-{module}-{device}")
    for name, accelerated in ACCELERATED.items()
    for device, module in accelerated.modules.items()
    if device in DEVICES
]


def test_every_formula_that_has_kernels_is_compared() -> None:
    assert check.EXAMPLES.keys() == ACCELERATED.keys()


@pytest.mark.parametrize(("name", "module", "device"), KERNELS)
def test_a_kernel_is_its_formula(name: str, module: str, device: str) -> None:
    found = check.compare(name, module, torch.device(device))
    assert found.difference <= 1e-6
    assert found.kernel_seconds > 0


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = ACCELERATED["log_probs_and_entropies"].formula
    wrong = lambda logits, *rest, **options: formula(0.999 * logits, *rest, **options)  # noqa: E731
    monkeypatch.setattr("rlprims.kernels.log_probs.log_probs_and_entropies", wrong)
    assert check.compare("log_probs_and_entropies", "log_probs", torch.device("cpu")).difference > check.TOLERANCE


LOGPROBS = {
    "from_logits": lambda x, ids: [logprobs.from_logits(x, ids, temperature=0.7)],
    "entropy_from_logits": lambda x, ids: [logprobs.entropy_from_logits(x, temperature=0.7)],
    "both": lambda x, ids: list(logprobs.from_logits_with_entropy(x, ids, temperature=0.7)),
    "from_hidden": lambda x, ids: list(logprobs.from_hidden(x, torch.eye(x.shape[-1], dtype=x.dtype), ids)),
    "capped": lambda x, ids: list(logprobs.from_hidden(x, torch.eye(x.shape[-1], dtype=x.dtype), ids, soft_cap=2.0)),
}


@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 50), (9, 70_000)])
def test_log_probs_by_kernels_are_those_of_the_formulas(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if name in ("from_hidden", "capped") and shape[-1] > 1000:
        shape = (9, 1000)  # the head is the identity
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtype)
    x[..., 1, :] = torch.nan  # a row that is none
    x.requires_grad_()
    ids = torch.randint(shape[-1], shape[:-1], generator=generator)
    outcomes = []
    for choice in ("default", "0"):
        monkeypatch.setenv("RLPRIMS_KERNELS", choice)
        outputs = LOGPROBS[name](x, ids)
        (slope,) = torch.autograd.grad(sum(x.nan_to_num().square().sum() for x in outputs), x)
        outcomes.append((*outputs, slope))
    for got, want in zip(*outcomes, strict=True):
        of_dtype = 1e-2 if dtype is torch.bfloat16 and got is outcomes[0][-1] else 1e-6
        torch.testing.assert_close(got, want, rtol=of_dtype, atol=of_dtype, equal_nan=True)


def test_in_place_the_gradient_is_where_the_logits_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPRIMS_KERNELS", raising=False)
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(12, 50_000, generator=generator, requires_grad=True)
    tokens = torch.randint(50_000, (12,), generator=generator)
    slopes, places = [], []
    for inplace in (False, True):
        logits = leaf * 5
        logits.register_hook(lambda slope: places.append(slope.data_ptr()))
        slopes += torch.autograd.grad(logprobs.from_logits(logits, tokens, inplace_backward=inplace).sum(), leaf)
        assert (places[-1] == logits.data_ptr()) is inplace
    assert torch.equal(*slopes)


def test_in_place_is_refused_where_another_function_has_saved_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPRIMS_KERNELS", raising=False)
    leaf, tokens = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    logits = leaf * 2
    entropies = logprobs.entropy_from_logits(logits)
    log_probs = logprobs.from_logits(logits, tokens, inplace_backward=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        (entropies + log_probs).sum().backward()


def test_a_head_that_depends_on_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second derivatives do not count the head's share twice."""
    penalties = []
    for choice in ("default", "0"):
        monkeypatch.setenv("RLPRIMS_KERNELS", choice)
        x = torch.tensor([[0.3, -1.0], [0.5, 2.0]], dtype=torch.float64, requires_grad=True)
        head = torch.cat([x.exp(), x * 2])
        (slope,) = torch.autograd.grad(
            logprobs.from_hidden(x, head, torch.tensor([0, 2])).log_probs.sin().sum(), x, create_graph=True
        )
        penalties.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*penalties)
