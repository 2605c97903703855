"""Every test of the log-probs runs twice: by the kernels, and by the formulas alone."""

import pytest


@pytest.fixture(autouse=True, params=["default", "0"], ids=["kernels", "formulas"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RLPRIMS_KERNELS", request.param)
    return str(request.param)
