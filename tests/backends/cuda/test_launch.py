"""A launch whose kernel asks for more than the GPU has."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from ostinato.backends.cuda.launch import TritonLaunch
from ostinato.errors import HardwareCannot


class Kernel:
    """One that cannot be loaded."""

    __name__ = "matmul_kernel"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def refuse(*args: Any, **words: Any) -> None:
            raise self._error

        return refuse


def test_it_is_told_by_the_kernels_name_with_both_numbers() -> None:
    launch = TritonLaunch(Kernel(OutOfResources(110_592, 101_376, "shared memory")), (1,), (), {})
    with pytest.raises(HardwareCannot, match=r"matmul_kernel needs 110592 .shared memory.*this GPU has 101376"):
        launch()


def test_any_other_error_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        TritonLaunch(Kernel(ZeroDivisionError()), (1,), (), {})()
