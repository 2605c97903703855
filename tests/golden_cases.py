"""The recorded cases of other libraries; see golden/README.md."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent / "golden"
Arrays = Mapping[str, Any]
Answer = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What a peer was given and what it answered. ``inputs`` are tensors, but arrays of strings, or None."""

    id: str
    primitive: str
    args: Mapping[str, Any]
    inputs: Arrays
    outputs: Arrays
    oracle: Arrays
    where: Mapping[str, str]
    recommend: str
    raises: str | None
    rtol: float
    atol: float

    @property
    def expected(self) -> Arrays:
        """The oracle where the peer is wrong, else the peer's answer."""
        return self.oracle if self.recommend == "deviate" else self.outputs

    @property
    def peer(self) -> str:
        return self.id.split("/")[0]

    def errors(self, got: Arrays, names: Iterable[str] | None = None) -> list[str]:
        """What of the answer is not within the case's tolerance of what is expected."""
        found = [self.error(name, got[name], self.expected[name]) for name in names or self.expected]
        return [error for error in found if error is not None]

    def error(
        self,
        name: str,
        got: Tensor,
        want: Tensor,
        mask: Tensor | None = None,
        tolerance: tuple[float, float] | None = None,
    ) -> str | None:
        """None if ``got`` is within the case's tolerance, or another, of ``want``, where the mask says it counts."""
        rtol, atol = tolerance or (self.rtol, self.atol)
        if isinstance(want, list):
            return None if got == want else f"{name}: {got}, not {want}"
        if got.shape != want.shape:
            return f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        if name in self.where and mask is None:
            kind, _, source = self.where[name].rpartition(":")
            mask = (self.outputs if kind == "out" else self.inputs)[source].bool()
        if mask is not None:
            got, want = got[mask], want[mask]
        try:
            torch.testing.assert_close(
                got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True, check_device=False
            )
        except AssertionError as error:
            return f"{name}: {error}"
        return None


Call = Callable[[Case], Answer]
Calls = dict[tuple[str, str], Call]


@cache
def _arrays(peer: str) -> Mapping[str, np.ndarray]:
    with np.load(HERE / f"{peer}.npz", allow_pickle=False) as file:
        return dict(file)


def _load(peer: str, keys: Mapping[str, str | None]) -> Arrays:
    def one(key: str | None) -> Any:
        if key is None:
            return None
        array = _arrays(peer)[key]
        return array.tolist() if array.dtype.kind in "US" else torch.from_numpy(array.copy())

    return {name: one(key) for name, key in keys.items()}


def cases() -> Iterator[Case]:
    for block in json.loads((HERE / "index.json").read_text()):
        for entry in block["cases"]:
            args = (
                {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in entry["args"].items()}
                if entry["args"]
                else {}
            )
            yield Case(
                id=entry["id"],
                primitive=entry["primitive"],
                args=args,
                inputs=_load(block["peer"], entry.get("inputs", {})),
                outputs=_load(block["peer"], entry.get("outputs", {})),
                oracle=_load(block["peer"], entry.get("oracle", {})),
                where=entry.get("where", {}),
                recommend=entry.get("recommend", "match"),
                raises=entry.get("raises"),
                rtol=entry["tolerance"][0],
                atol=entry["tolerance"][1],
            )
