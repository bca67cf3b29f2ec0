"""Kernels run in Triton's interpreter here, on the CPU (`tests/conftest.py` tells it). It takes milliseconds for every
program, so they are left out of the quick part."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with BLAS, whose bits of a row depend, on some CPUs, on the row's place in the tile. A
    test that wants them to depend on nothing but the row gets sums in the order of columns."""
    monkeypatch.setattr(np, "matmul", _matmul_in_order)


def _matmul_in_order(a: NDArray[Any], b: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for column in range(a.shape[-1]):
        total += np.multiply(a[..., column, None], b[..., column, None, :], dtype=dtype)
    return total
