"""The command line of audits: how it is used, its exit codes, and ``halfulp compare``."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from audit_command import TRAIN, Halfulp, script

import halfulp as hu
from halfulp import cli
from halfulp.audit.settings import AUDITED
from halfulp.cli import audit_command


def test_the_help_names_the_grids_that_are_the_default() -> None:
    assert f"default {','.join(AUDITED)}." in Path(audit_command.__file__).read_text()


# ---- usage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "args", "said"),
    [
        (None, [], "no script at train.py."),
        (TRAIN, ["--grids", "bf17"], "unknown grid 'bf17'"),
        (TRAIN, ["--grids", ","], "at least one grid"),
        (TRAIN, ["--grids", "bf16,bf16"], "repeat"),
        (TRAIN, ["--every", "0"], "at least 1"),
        (TRAIN, ["--sample", "2"], "above 0 and at most 1"),
        (TRAIN, ["--out", "taken"], "is not an empty folder"),
        (TRAIN, ["--steps", "8"], "--steps is for the estimate of --live"),
        (TRAIN, ["--scores", "e5m2:\u0661-\u0662"], "--scores takes a grid and its steps"),
        (
            """
            import torch
            class Still(torch.optim.SGD):
                def step(self): pass
            p = torch.nn.Parameter(torch.ones(2))
            Still([p], lr=0.1).step()
            """,
            [],
            "called step() 1 times, but no weight had a gradient or changed there",
        ),
        ("import torch", [], "never called an optimizer's step()"),
        (TRAIN.replace("optimizer.step()", "pass"), [], "never called an optimizer's step()"),
        (
            """
            import torch
            p = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            torch.optim.SGD([p], lr=0.1).step()
            """,
            [],
            "have no trainable parameters",
        ),
    ],
)
def test_wrong_use(halfulp: Halfulp, text: str | None, args: list[str], said: str) -> None:
    """One clear line, exit code 2, and no folder left behind."""
    Path("taken").mkdir()
    Path("taken/file").write_text("")
    if text is not None:
        script(text)
    code, _, err = halfulp("audit", *args, "train.py")
    assert code == 2
    assert err.startswith("halfulp: ")
    assert said in err
    assert "Traceback" not in err
    assert not Path("runs/train").exists()


def test_folders_are_never_written_twice(halfulp: Halfulp) -> None:
    path = script(TRAIN)
    for expected in ("train", "train-2", "train-3"):
        code, _, err = halfulp("audit", "--grids", "bf16", path)
        assert code == 0
        assert f"The trace is in runs/{expected}." in err
    code, _, err = halfulp("audit", "--grids", "bf16", "--out", "runs/train", path)
    assert code == 2
    assert "holds a trace already" in err


def test_nothing_is_left_where_nothing_was_recorded(halfulp: Halfulp) -> None:
    """Not even the folder of traces, unless it was there."""
    script("print('no step')")
    assert halfulp("audit", "train.py")[0] == 2
    script(TRAIN.replace("model.parameters()", "[torch.nn.Parameter(torch.ones(2))]"))
    assert halfulp("audit", "train.py")[0] == 2
    assert os.listdir() == ["train.py"]
    Path("runs").mkdir()
    assert halfulp("audit", "train.py")[0] == 2
    assert os.listdir("runs") == []


def test_a_folder_that_the_script_makes_is_its_own(halfulp: Halfulp) -> None:
    """It is there when the script asks whether it is, with nothing in it; the trace goes beside it."""
    script(TRAIN.replace("import sys\n", "import sys, os; os.makedirs('runs/train')\n"))
    code, _, err = halfulp("audit", "train.py")
    assert code == 0
    assert "runs/train-2" in err
    assert os.listdir("runs/train") == []
    assert len(hu.Trace.open("runs/train-2").steps) == 8


def test_options_reach_the_audit(halfulp: Halfulp) -> None:
    code, _, _ = halfulp(
        "audit", "--grids", "bf16", "--every", "3", "--sample", "0.5", "--decay", script(TRAIN)
    )
    assert code == 0
    trace = hu.Trace.open("runs/train")
    assert trace.steps.tolist() == [1, 4, 7]
    assert trace.manifest["options"]["sample"] == 0.5
    assert trace.table().to_polars()["frozen_decay"].null_count() == 0


def test_resume_after_a_crash(halfulp: Halfulp) -> None:
    """The second run repeats the first steps without recording them; the trace is that of one run."""
    path = script(TRAIN)
    assert halfulp("audit", "--grids", "bf16", "--out", "whole", path)[0] == 0
    script(TRAIN + "        if step == 5: raise ValueError('node failure')\n")
    assert halfulp("audit", "--grids", "bf16", path)[0] == 1
    script(TRAIN)
    code, _, err = halfulp("audit", "--grids", "bf16", "--resume", path)
    assert code == 0
    assert "8 steps audited" in err
    whole, resumed = hu.Trace.open("whole"), hu.Trace.open("runs/train")
    assert len(resumed.parts) == 2
    assert whole.table().equals(resumed.table())
    assert whole.scan("run").equals(resumed.scan("run"))
    code, _, err = halfulp("audit", "--grids", "e5m2", "--resume", path)
    assert code == 2
    assert "it was recorded with grids=['bf16'], not ['e5m2']" in err


@pytest.mark.parametrize("another", [False, True])
def test_a_folder_that_goes_in_mid_run_is_said(halfulp: Halfulp, another: bool) -> None:
    """Where another trace has taken the place, too: its verdict is not that of this run."""
    halfulp("audit", "--out", "other", script(TRAIN))
    goes = "shutil.rmtree('out') if step == 5 else None"
    if another:
        goes += "; shutil.copytree('other', 'out') if step == 5 else None"
    text = TRAIN.replace("import sys", "import shutil").replace(
        "optimizer.zero_grad()", f"optimizer.zero_grad(); {goes}"
    )
    code, out, err = halfulp("audit", "--out", "out", script(text))
    assert code == 0
    assert len(out.splitlines()) == 8
    assert err.count("out is no longer the folder that this recording began") == 1
    assert err.endswith("halfulp: there is no verdict: out no longer holds the trace of this run.\n")
    assert "The trace is in" not in err
    assert not another or hu.Trace.open("out").trouble is None


def test_a_damaged_trace_is_exit_code_3(halfulp: Halfulp) -> None:
    path = script(TRAIN)
    halfulp("audit", "--grids", "bf16", path)
    shutil.copytree("runs/train", "runs/copy")
    table = Path("runs/copy/parts/000000/tables.safetensors")
    table.write_bytes(table.read_bytes()[:-1])
    code, _, err = halfulp("audit", "--grids", "bf16", "--out", "runs/copy", "--resume", path)
    assert code == 3
    assert f"{table} is not what was written" in err
    code, _, err = halfulp("compare", "runs/train", "runs/copy")
    assert code == 3


# ---- exit codes of the command line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (hu.UsageError("wrong"), 2, "halfulp: wrong\n"),
        (hu.CorruptionError("bad \x1b[31m"), 3, "halfulp: bad \\x1b[31m\n"),
        (PermissionError(13, "Permission denied", "/x\x1b"), 4, "refused at /x\\x1b: Permission denied.\n"),
        (OSError(28, "No space left on device"), 4, "the system refused: No space left on device.\n"),
        (BrokenPipeError(32, "Broken pipe"), 4, "halfulp: whoever read the output has closed it.\n"),
        (ZeroDivisionError("no"), 4, "this is a fault of halfulp's"),
        (RuntimeError("no"), 4, "this is a fault of halfulp's"),
    ],
)
def test_exit_codes(
    halfulp: Halfulp, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    """1 is left to gates and validations."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(hu.Trace, "open", fail)
    found, _, err = halfulp("compare", "a", "b")
    assert found == code
    assert said in err
    assert ("Traceback" in err) == ("fault" in said)


def test_an_interrupt_is_handed_to_the_interpreter(halfulp: Halfulp, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hu.Trace, "open", fail)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["halfulp", "compare", "a", "b"])
    with pytest.raises(KeyboardInterrupt):
        cli.main()


def test_odd_budgets(halfulp: Halfulp) -> None:
    """Digits are the ten that everybody types, and a number is written in one way."""
    halfulp("audit", "--grids", "bf16", "--scores", "bf16:1-8", script(TRAIN))
    arabic = ("\u0661\u0660\u066a", "\u0661\u0660%", "\u00b2")
    for odd in (*arabic, "1e3%", "007", "01%", "1.%", ".5%", "1.5", "-1", "+1", "1_0", "", "%", "ten"):
        code, _, err = halfulp("allocate", "runs/train", f"--budget={odd}")
        assert code == 2, odd
        assert "Traceback" not in err
        assert "--budget takes a share such as 10%" in err, odd
    for budget in ("50%", "32.5%", "400"):
        assert halfulp("allocate", "runs/train", f"--budget={budget}")[0] == 0


def test_a_full_disk_leaves_nothing_of_a_page_or_a_mask(
    halfulp: Halfulp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files go through one place, which says what was refused."""
    from halfulp import files

    halfulp("audit", "--grids", "bf16", "--scores", "bf16:1-8", script(TRAIN))

    def full(operation: str, path: Path) -> None:
        if operation == "rename":
            raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(Path("runs/train").iterdir())
    monkeypatch.setattr(files, "hook", full)
    for command in (
        ("report", "runs/train", "-o", "page.html"),
        ("figures", "runs/train", "-o", "drawn"),
        ("allocate", "runs/train", "--budget", "50%", "-o", "mask.safetensors"),
    ):
        code, _, err = halfulp(*command)
        assert code == 4, err
        assert "the disk is full" in err
        assert not Path(command[-1]).is_file()
    assert sorted(Path("runs/train").iterdir()) == before


# ---- compare ---------------------------------------------------------------------------------------------


def test_compare_a_forecast_with_its_outcome(halfulp: Halfulp) -> None:
    """The reference's projection beside the run on the grid, with the measures of the library."""
    from halfulp.audit.rehearsal.forecast_outcome import compare_grid

    reference = script(TRAIN, "reference.py")
    measured = script(
        TRAIN.replace(
            "for step",
            "import halfulp\n    optimizer = halfulp.WriteBack(optimizer, 'e4m3@128', 'rne', model=model, "
            "params=lambda n, p: True)\n    for step",
        ),
        "measured.py",
    )
    for path in (reference, measured):
        assert halfulp("audit", "--grids", "e4m3@128,bf16", path)[0] == 0
    code, out, _ = halfulp("compare", "runs/reference", "runs/measured", "--grid", "e4m3@128")
    assert code == 0
    a, b = hu.Trace.open("runs/reference"), hu.Trace.open("runs/measured")
    c = compare_grid(a, b, "e4m3@128")
    rmse = np.sqrt(np.mean((a.frozen("e4m3@128") - b.frozen("e4m3@128")) ** 2))
    assert c.rmse == pytest.approx(rmse, rel=1e-12)
    assert "e4m3@128, scope of what is stored on it, 8 steps:" in out
    assert f"RMSE {rmse:.5f}" in out
    assert "majority unchanged: forecast step 1, measured step 1" in out
    assert "bf16" not in out
    code, out, _ = halfulp("compare", "runs/reference", "runs/measured", "--scope", "norm", "--warmup", "2")
    assert code == 0
    assert "bf16, scope norm, 6 steps:" in out


def test_traces_that_cannot_be_compared(halfulp: Halfulp) -> None:
    halfulp("audit", "--grids", "bf16", script(TRAIN, "one.py"))
    halfulp("audit", "--grids", "bf16", script(TRAIN.replace("32", "31"), "two.py"))
    halfulp("audit", "--grids", "e5m2", script(TRAIN, "three.py"))
    for other, said in (("two", "not of the same model"), ("three", "no grid to compare")):
        code, _, err = halfulp("compare", "runs/one", f"runs/{other}")
        assert code == 2
        assert said in err
    code, _, err = halfulp("compare", "runs/one", "runs/nothing")
    assert code == 3
    assert "runs/nothing is not a trace" in err


def test_a_terminal_that_knows_ascii_only() -> None:
    """What it does not know is escaped."""
    said = subprocess.run(
        [sys.executable, "-c", "from halfulp.cli import main; main()", "grids"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}, capture_output=True, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, b"")
    assert b"bf16" in said.stdout
    assert b"\\u2026" in said.stdout  # an ellipsis
    assert said.stdout.isascii()


def test_a_terminal_gets_lines_broken_at_words() -> None:
    """What is to be pasted stays on one line; elsewhere lines are whole."""
    import io

    from rich.console import Console

    from halfulp.cli.console import print_plain

    lines = [
        "Why    " + "word " * 9 + "end",
        "Fix    import halfulp as hu",
        "       " + "x = 1; " * 9,
        "Cost   " + "word " * 9,
    ]
    said = {}
    for terminal in (True, False):
        out = io.StringIO()
        print_plain(Console(file=out, force_terminal=terminal, width=40, color_system=None), *lines)
        said[terminal] = out.getvalue().splitlines()
    assert said[False] == lines
    assert said[True] == [
        "Why    word word word word word word", "       word word word end", *lines[1:3],
        "Cost   word word word word word word", "       word word word",
    ]  # fmt: skip
