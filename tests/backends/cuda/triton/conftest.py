"""Kernels run in Triton's interpreter here, on the CPU (`tests/conftest.py` tells it). It takes milliseconds for every
program, so they are left out of the quick part."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
