"""pytest: ``@pytest.mark.halfulp(arrives=0.99)`` holds every optimizer that steps in a test to a contract.

The keywords are the terms of :func:`halfulp.require`. The plug-in is found by pytest where halfulp is
installed, and imports nothing until a test carries the mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

MARK = "halfulp"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers", "halfulp(**terms): hold every optimizer that steps in this test to a precision contract"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold the optimizers of a marked test to its terms; a test in which none steps fails."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return (yield)
    from halfulp.contract import Contract, ContractError, Terms
    from halfulp.errors import UsageError

    if mark.args:
        raise UsageError(
            "@pytest.mark.halfulp takes the terms of a contract by name, such as arrives=0.99, "
            f"not {mark.args!r}."
        )
    terms: dict[str, Any] = {"every": 1, **mark.kwargs}
    with Contract(None, Terms.of(terms)) as contract:
        result = yield
    if contract.failures:  # the test went on after it
        raise ContractError(contract.failures[0])
    if contract.checked and contract.unmatched:
        breach = contract.unmatched_breaches()[0]
        raise ContractError(f"moving: {breach.where}: {breach.found}; {breach.fix}.")
    if not contract.checked:
        raise ContractError(
            f"{item.nodeid} is marked with a precision contract, but no optimizer stepped in it."
        )
    return result
