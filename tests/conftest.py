"""What every test file shares: deterministic property tests, slow and large tests, threads put back, the
command line, and a summary of what was left out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import durations
import hypothesis
import pytest
import torch
from audit_command import Halfulp

from halfulp import cli

hypothesis.settings.register_profile(
    "halfulp", derandomize=True, deadline=None, database=None, max_examples=60, print_blob=True
)
hypothesis.settings.load_profile("halfulp")

TAKEN = durations.Durations()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", type=Path, help="write how long each test function took: a table")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a while, by tests/durations.tsv; not in make check")
    config.addinivalue_line("markers", "large: needs gigabytes or minutes; run with -m large")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow; without -m, leave out what is large; for several processes, long files first."""
    table = durations.read()
    for item in items:
        if table.slow(durations.function_of(item.nodeid)):
            item.add_marker("slow")
    if not config.getoption("markexpr"):
        large = [item for item in items if item.get_closest_marker("large")]
        config.hook.pytest_deselected(items=large)
        items[:] = [item for item in items if item not in large]
    if hasattr(config, "workerinput"):
        seconds = table.of_files()
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TAKEN.add(durations.function_of(report.nodeid), report.duration, report.when == "call")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was skipped and why, in one place and in every run: nothing, where everything is installed."""
    if config.getoption("durations_to"):
        TAKEN.write(config.getoption("durations_to"))
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    terminalreporter.section(f"skipped: {reasons.total() or 'nothing'}")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count:5d}  {reason}")


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """Puts ``__main__`` back: a script that was run stays it, and multiprocessing would run it again."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test set the number of threads; puts it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: None) -> None:
    """For small tensors: two threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def halfulp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Halfulp:
    """The command line in a folder of its own: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halfulp", *map(str, args)])
        before = list(sys.path)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert sys.path == before
        assert torch.Tensor.backward.__module__ == "torch._tensor"  # nothing stays behind
        out, err = capfd.readouterr()
        code = stopped.value.code
        return (0 if code is None else int(code)), out, err

    return call
