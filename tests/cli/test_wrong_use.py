"""Commands that are given the wrong thing: each says what to do, and costs nobody a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from report_traces import synthetic
from safetensors.torch import save_file
from study.samples import invoke
from torch import ones

import halfulp as hu
from halfulp import checkpoints
from halfulp.data import prepare, prose
from halfulp.errors import UsageError
from halfulp.outputs import check_output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace, two checkpoints and a script."""
    monkeypatch.chdir(tmp_path)
    synthetic(tmp_path / "run", steps=20, layers=1)
    for name, value in (("a", 2.0), ("b", 3.0)):
        save_file({"mlp.weight": (ones(8, 8) * value).bfloat16()}, f"{name}.safetensors")
    Path("train.py").write_text("print('trained')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "there"),
    [
        (("diff", "a.safetensors", "b.safetensors", "--page", "a.safetensors"), "a.safetensors"),
        (("report", "run", "-o", "train.py"), "train.py"),
        (("report", "run", "--csv", "b.safetensors"), "b.safetensors"),
        (("allocate", "run", "--budget", "10%", "-o", "a.safetensors"), "a.safetensors"),
        (("allocate", "run", "--budget", "10%", "-o", "train.py"), "train.py"),
    ],
)
def test_an_output_replaces_only_its_own_kind(
    here: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], there: str
) -> None:
    before = (here / there).read_bytes()
    code, _, error = invoke(capsys, *command)
    assert (code, "choose another" in error) == (2, True), error
    assert (here / there).read_bytes() == before


def test_an_output_of_the_same_kind_is_replaced(here: Path) -> None:
    (here / "page.HTML").write_text("an older page")
    check_output(here / "page.HTML", ".html")
    check_output(here / "not there yet", ".html")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ("check", "a.safetensors", "--lr", "1", "--optimizer", "lion", "--betas", "0.9,0.99"),
            "leave them out",
        ),
        (("check", "a.safetensors", "--lr", "1", "--bound", "2", "--betas", "0.9,0.99"), "leave them out"),
        (("check", "maker/model"), "A model of a hub is downloaded first"),
        (("compare", "run", "run", "--warmup", "-3"), "--warmup"),
        (
            ("pilot", "--formats", "bf16", "--evaluate", "f", "--small", "'-b 1", "train.py"),
            "No closing quotation",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], said: str
) -> None:
    code, _, error = invoke(capsys, *command)
    assert (code, said in error, "Traceback" in error) == (2, True, False), error


@pytest.mark.parametrize(
    "command",
    [
        ("pilot", "--formats", "bf16", "--evaluate", "f", "--out", "train.py", "train.py"),
        ("figures", "run", "--out", "train.py"),
    ],
)
def test_a_file_where_a_folder_goes_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    code, _, error = invoke(capsys, *command)
    assert (code, "Cannot create train.py: it exists and is no folder" in error) == (4, True), error


def test_a_study_file_that_never_ends_is_not_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device would be read until memory is full, and a pipe would be waited for."""
    Path("zero.py").symlink_to("/dev/zero")
    os.mkfifo("pipe.py")
    for name in ("zero.py", "pipe.py"):
        code, _, error = invoke(capsys, "study", "show", name)
        assert (code, f"{name} is not a plain file" in error) == (2, True), error


def test_sources_that_are_no_folder(here: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder nowhere: --mirror takes"):
        prose.build(here / "data", "nowhere")
    with pytest.raises(UsageError, match="there is no folder nowhere: --source takes"):
        prepare.prepare("openwebtext", here / "data", "nowhere", yes=True)


def test_a_checkpoint_that_was_cut_short_is_called_that(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path("a.safetensors").read_bytes()
    Path("a.safetensors").write_bytes(whole[:-100])
    code, _, error = invoke(capsys, "check", "a.safetensors")
    said = "a.safetensors is cut short: tensor 'mlp.weight' ends at byte 128 of the data, and the file has 28"
    assert (code, said in error) == (3, True), error


def test_a_difference_of_nothing_reads_well(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "64 weights: 100.00% unchanged [bfloat16]."
        in invoke(capsys, "diff", "a.safetensors", "a.safetensors")[1]
    )


@pytest.mark.parametrize("given", [None, 5, b"run", [], "", "a\0b"])
def test_what_is_no_path_is_refused(given: Any) -> None:
    for opens in (hu.Trace.open, hu.Mask.load, partial(hu.allocate, budget=0.1)):
        with pytest.raises(UsageError, match="is not the path of a"):
            opens(given)


def test_wrong_types_are_named(here: Path) -> None:
    """Python's own words for them would name neither the argument nor what it takes."""
    trace, mask = hu.Trace.open("run"), hu.Mask(tiles={"w": ones(2) > 0}, sizes={"w": 9}, score="P", budget=9)
    grid = trace.grids[0]
    weights = {"w": ones(4)}
    sync = hu.Sync(weights)
    weights["w"] = ones(3)
    wrong: dict[str, Callable[[], object]] = {
        "a scope is the name": lambda: trace.frozen(grid, 5),  # type: ignore[arg-type]
        "takes the changes of all ranks, in a list": lambda: checkpoints.join(None),  # type: ignore[arg-type]
        "takes those of all ranks, in a list": lambda: checkpoints.join_positions(5),  # type: ignore[arg-type]
        "no tensor 'x', only 'w'": lambda: mask.payload("x"),
        "a mask of the same tensors, 'w'": lambda: mask.overlap("x"),  # type: ignore[arg-type]
        "'w' had 4 values of 4 bytes at the last sync, and has 3": sync.take,
    }
    for said, call in wrong.items():
        with pytest.raises(UsageError, match=said):
            call()
