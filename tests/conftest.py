"""What every test file shares: deterministic property tests, slow tests by request, threads put back."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "halfulp", derandomize=True, deadline=None, database=None, max_examples=60, print_blob=True
)
hypothesis.settings.load_profile("halfulp")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs gigabytes or minutes; run with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m, leave slow tests out."""
    if config.getoption("markexpr"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test set the number of threads; puts it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
