"""``halfulp audit`` on scripts that know nothing of it, and ``halfulp compare`` on what it leaves."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp import cli

TRAIN = """
    import sys
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
"""

Halfulp = Callable[..., tuple[int, str, str]]


@pytest.fixture
def halfulp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Halfulp:
    """The command line in a folder of its own: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halfulp", *map(str, args)])
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the script stays __main__
        before = list(sys.path)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert sys.path == before
        assert torch.Tensor.backward.__module__ == "torch._tensor"  # nothing stays behind
        out, err = capfd.readouterr()
        code = stopped.value.code
        return (0 if code is None else int(code)), out, err

    return call


def script(text: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(hu.__file__).parent.parent), "COLUMNS": "200", **more}


# ---- the script's side -----------------------------------------------------------------------------------


def test_a_script_prints_what_it_always_prints(halfulp: Halfulp) -> None:
    """Its output is its own, to the last digit; the verdict goes to stderr; the losses are in the trace."""
    path = script(TRAIN)
    plain = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment(),
    )
    code, out, err = halfulp("audit", path)
    assert code == 0
    assert out == plain.stdout
    trace = hu.Trace.open("runs/train")
    run = trace.scan("run").collect()
    assert [f"{s} {x}" for s, x in run.iter_rows()] == out.splitlines()
    assert [t["name"] for t in trace.tensors] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert [t["group"] for t in trace.tensors] == ["other", "other", "norm", "norm", "other", "other"]
    assert trace.grids == ["bf16", "fp16", "e5m2", "e4m3@128"]
    assert trace.manifest["run"] == {"script": "train.py", "arguments": []}
    assert "8 steps audited (to step 8), 6 tensors, 451 weights; the optimizer sees float32." in err
    assert "1.weight (norm): 100.0% of its updates lost, 100% never moved" in err
    assert "The trace is in runs/train." in err


def test_the_script_is_main_and_gets_its_own_arguments(halfulp: Halfulp) -> None:
    """Options after the script are the script's, even those that halfulp has too."""
    path = script(
        """
        import sys
        from pathlib import Path
        from beside import VALUE

        assert __name__ == "__main__"
        assert Path(__file__).is_absolute() and Path(__file__) == Path(sys.argv[0]).absolute()
        assert sys.modules["__main__"].__file__ == __file__
        assert Path(sys.path[0]) == Path(__file__).resolve().parent
        print(VALUE, sys.argv[1:])
        import torch
        p = torch.nn.Parameter(torch.ones(2, 2))
        o = torch.optim.SGD([p], lr=1e-3)
        p.sum().backward()
        o.step()
        """,
        "somewhere/train.py",
    )
    script("VALUE = 41", "somewhere/beside.py")
    args = ["--out", "x", "--grids=none", "-h", "--help", "--", "--resume", "", "a b"]
    code, out, _ = halfulp("audit", "--grids", "e5m2, bf16", "--out", "mine", path, *args)
    assert code == 0
    assert out.strip() == f"41 {args}"
    trace = hu.Trace.open("mine")
    assert trace.grids == ["e5m2", "bf16"]
    assert trace.manifest["run"] == {"script": "train.py", "arguments": args}
    assert not Path("x").exists()


def test_a_script_that_changes_its_folder(halfulp: Halfulp, tmp_path: Path) -> None:
    """The trace is where it was to be, and the verdict is read from there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = script(f"import os\nos.chdir({str(elsewhere)!r})\n" + textwrap.dedent(TRAIN), "train.py")
    here = Path.cwd()
    try:
        code, _, err = halfulp("audit", "--grids", "bf16", path)
    finally:
        os.chdir(here)
    assert code == 0
    assert "8 steps audited" in err
    assert hu.Trace.open("runs/train").last_step == 8


def test_a_proposal_of_zero_is_not_a_lost_update(halfulp: Halfulp) -> None:
    """Rows of an embedding that no batch uses have nothing to lose, on however fine a grid."""
    path = script(
        """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Embedding(1000, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.arange(20)).square().mean().backward()
            optimizer.step()
        """,
        "train.py",
    )
    code, _, err = halfulp("audit", "--grids", "m20", path)
    assert code == 0
    assert "m20: 0.0% of updates would be lost" in err
    assert "98.0% of the proposals were zero, with nothing to lose" in err
    assert hu.Trace.open("runs/train").frozen("m20")[-1] == 0.98  # the event itself counts them


@pytest.mark.parametrize(
    ("policy", "said"),
    [("rne", "e4m3@128: 100.0% of updates lost"), ("sr", "e4m3@128, sr write-back: ")],
)
def test_the_verdict_of_a_run_on_the_grid(halfulp: Halfulp, policy: str, said: str) -> None:
    """What happened to the weights on the grid, apart from those that are not; no cure for what is cured."""
    path = script(
        f"""
        import torch
        import halfulp as hu
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        inner = torch.optim.SGD(model.parameters(), lr=1e-5)
        optimizer = hu.WriteBack(inner, "e4m3@128", "{policy}", model=model)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        """,
        "train.py",
    )
    code, _, err = halfulp("audit", "--grids", "e4m3@128", path)
    assert code == 0
    assert said in err
    assert "1 tensor(s) with 1.5% of the weights are not stored on it" in err
    assert ("would keep them" in err) == (policy == "rne")
    assert ("not a loss" in err) == (policy == "sr")


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data left')", 1, "no data left\n"),
    ],
)
def test_the_exit_code_is_the_scripts(halfulp: Halfulp, ending: str, code: int, said: str) -> None:
    found, _, err = halfulp("audit", "--grids", "bf16", script(f"{textwrap.dedent(TRAIN)}\n{ending}"))
    assert found == code
    assert said in err
    assert hu.Trace.open("runs/train").last_step == 8
    assert "8 steps audited" in err


def test_a_script_that_crashes(halfulp: Halfulp) -> None:
    """Its own traceback, nothing of the runner's; what was recorded stays; exit code 1."""
    text = TRAIN + "        if step == 5:\n            raise ValueError(f'bad batch at {step}')\n"
    code, out, err = halfulp("audit", "--grids", "bf16", script(text))
    assert code == 1
    assert len(out.splitlines()) == 5
    holds, _, err = err.partition("\n")  # said after the first step
    assert holds.startswith("halfulp: The optimizer holds: parameters float32; gradients float32; exp_avg")
    traceback, _, rest = err.partition("halfulp: the script failed")
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert f'File "{Path("train.py").absolute()}", line 15, in <module>' in traceback
    assert "ValueError: bad batch at 5" in traceback
    assert "runpy" not in traceback
    assert "halfulp" not in traceback
    assert "5 steps audited" in rest
    assert hu.Trace.open("runs/train").last_step == 5


@pytest.mark.parametrize("kind", ["UsageError", "CorruptionError", "DiskError", "MissingError"])
def test_an_error_of_halfulps_that_the_script_raises_is_the_scripts(kind: str, halfulp: Halfulp) -> None:
    """It uses the library itself: a traceback, the verdict and exit code 1, as for any other error."""
    text = (
        TRAIN
        + f"        if step == 5:\n            from halfulp.errors import {kind}; raise {kind}('mine')\n"
    )
    code, _, err = halfulp("audit", "--grids", "bf16", script(text))
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert f"halfulp.errors.{kind}: mine" in err
    assert "halfulp: the script failed; the trace keeps what was recorded." in err
    assert "5 steps audited" in err


def test_an_error_of_an_audit_of_the_scripts_own_is_the_scripts(halfulp: Halfulp) -> None:
    """Its own is refused something in the same step that another one records."""
    text = TRAIN.replace(
        "    for step",
        "    import halfulp\n    own = halfulp.Audit(optimizer, ['bf16'], groups=lambda *_: 3)\n"
        "    own.start()\n    for step",
    )
    code, _, err = halfulp("audit", "--grids", "bf16", script(text))
    assert code == 1
    assert "UsageError: groups= must give a string: for '0.weight' it gave 3." in err
    assert "halfulp: the script failed; no step was recorded." in err


def test_a_script_that_cannot_be_compiled(halfulp: Halfulp) -> None:
    code, _, err = halfulp("audit", script("def broken(:\n"))
    assert code == 1
    assert "SyntaxError" in err
    assert f'File "{Path("train.py").absolute()}", line 1' in err
    assert not Path("runs/train").exists()  # nothing was recorded


def test_names_of_a_script_with_classes(halfulp: Halfulp) -> None:
    """The model is an attribute of a trainer, the step is inside a method, the loop in a function."""
    code, _, _ = halfulp(
        "audit",
        "--grids",
        "bf16",
        script(
            """
            import torch

            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.wte = torch.nn.Embedding(7, 4)
                    self.attn = torch.nn.MultiheadAttention(4, 2, batch_first=True)
                    self.norm = torch.nn.LayerNorm(4)
                    self.lm_head = torch.nn.Linear(4, 7)

                def forward(self, x):
                    x = self.wte(x)
                    return self.lm_head(self.norm(self.attn(x, x, x)[0]))

            class Trainer:
                def __init__(self):
                    self.net = Net()
                    self.opt = torch.optim.AdamW(self.net.parameters())

                def update(self):
                    self.net(torch.randint(0, 7, (2, 5))).square().mean().backward()
                    self.opt.step()

            def main():
                Trainer().update()

            if __name__ == "__main__":
                main()
            """
        ),
    )
    assert code == 0
    assert {t["name"]: t["group"] for t in hu.Trace.open("runs/train").tensors} == {
        "wte.weight": "embedding",
        "attn.in_proj_weight": "attention",
        "attn.in_proj_bias": "attention",
        "attn.out_proj.weight": "attention",
        "attn.out_proj.bias": "attention",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "lm_head.weight": "head",
        "lm_head.bias": "head",
    }


def test_the_loss_is_the_one_before_the_scaler(halfulp: Halfulp) -> None:
    text = TRAIN.replace("loss.backward()", "scaler.scale(loss).backward()")
    text = text.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    text = text.replace(
        "    for step", "    scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n    for step"
    )
    code, out, _ = halfulp("audit", "--grids", "bf16", script(text))
    assert code == 0
    run = hu.Trace.open("runs/train").scan("run").collect()
    assert [f"{s} {x}" for s, x in run.iter_rows()] == out.splitlines()


@pytest.mark.parametrize("scales", [False, True])
def test_the_loss_is_what_it_was_when_backward_was_called(scales: bool, halfulp: Halfulp) -> None:
    """A script may write to its own afterwards, or call backward on what is no loss."""
    text = TRAIN.replace(
        "loss.backward()",
        "shown = loss.item(); loss.backward(); loss.detach().mul_(1000); z.backward(torch.ones_like(z))",
    )
    text = text.replace("print(step, loss.item())", "print(step, shown)")
    text = text.replace(
        "        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        z = odd.sum()\n"
    )
    odd = "odd = torch.ones(2, dtype=torch.complex64, requires_grad=True)"
    text = text.replace("    for step", f"    {odd}\n    for step")
    if scales:
        text = text.replace(
            "loss.backward();", "scaled = scaler.scale(loss); loss.detach().mul_(1000); scaled.backward();"
        )
        text = text.replace(
            "    for step", "    scaler = torch.amp.GradScaler('cpu', init_scale=8.0)\n    for step"
        )
    code, out, err = halfulp("audit", "--grids", "bf16", script(text))
    assert code == 0, err
    run = hu.Trace.open("runs/train").scan("run").collect()
    assert [f"{s} {x}" for s, x in run.iter_rows()] == out.splitlines()


def test_a_bfloat16_script_needs_no_other_command(halfulp: Halfulp) -> None:
    """Of the usual grids, what bfloat16 cannot hold is left out, and said to be; asked for, it is refused."""
    text = TRAIN.replace("optimizer =", "model.bfloat16()\n    optimizer =")
    text = text.replace("torch.randn(16, 8)", "torch.randn(16, 8).bfloat16()")
    path = script(text)
    code, out, err = halfulp("audit", path)
    assert code == 0
    assert len(out.splitlines()) == 8
    assert "fp16 left out: what the optimizer sees (bfloat16) does not hold its values" in err
    assert "the optimizer sees bfloat16" in err
    assert "bf16: " in err
    assert hu.Trace.open("runs/train").grids == ["bf16", "e5m2", "e4m3@128"]
    code, out, err = halfulp("audit", "--resume", path)
    assert code == 0
    assert "8 steps audited" in err
    code, out, err = halfulp("audit", "--grids", "bf16,fp16", "--out", "other", path)
    assert code == 2
    assert out == ""
    assert "halfulp: parameter '0.weight': grid fp16 does not fit bfloat16" in err
    assert "Traceback" not in err
    assert not Path("other").exists()


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


def test_options_reach_the_audit(halfulp: Halfulp) -> None:
    code, _, _ = halfulp(
        "audit", "--grids", "bf16", "--every", "3", "--sample", "0.5", "--decay", script(TRAIN)
    )
    assert code == 0
    trace = hu.Trace.open("runs/train")
    assert trace.steps.tolist() == [1, 4, 7]
    assert trace.manifest["options"]["sample"] == 0.5
    assert trace.table()["frozen_decay"].null_count() == 0


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
    assert whole.scan("run").collect().equals(resumed.scan("run").collect())
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
    table = Path("runs/copy/parts/000000/grids.parquet")
    table.write_bytes(table.read_bytes()[:-1])
    code, _, err = halfulp("audit", "--grids", "bf16", "--out", "runs/copy", "--resume", path)
    assert code == 3
    assert f"{table} is not what was written" in err
    code, _, err = halfulp("compare", "runs/train", "runs/copy")
    assert code == 3


# ---- modules, and what belongs to the script -------------------------------------------------------------


def test_a_module_runs_as_by_python(halfulp: Halfulp, tmp_path: Path) -> None:
    """Its name, package, spec, arguments and path are those that ``python -m`` gives it."""
    script("VALUE = 41", "package/beside.py")
    script("", "package/__init__.py")
    text = """
        import sys
        from .beside import VALUE

        print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], VALUE)
        print(sys.modules["__main__"].__dict__ is globals(), __loader__ is __spec__.loader)
        import torch
        p = torch.nn.Parameter(torch.ones(2, 2))
        o = torch.optim.SGD([p], lr=1e-3)
        p.sum().backward()
        o.step()
        """
    script(text, "package/train.py")
    script(text, "package/__main__.py")
    for module in ("package.train", "package"):
        plain = subprocess.run(
            [sys.executable, "-m", module, "--out", "x", "-m", "--help"],
            capture_output=True, text=True, check=True, timeout=120, env=environment(),
        )  # fmt: skip
        sys.modules.pop("package", None)
        code, out, err = halfulp("audit", "--grids", "bf16", "-m", module, "--out", "x", "-m", "--help")
        sys.modules.pop("package.beside", None)
        assert code == 0, err
        assert out == plain.stdout
        trace = hu.Trace.open(f"runs/{module}")
        told = {"script": f"-m {module}", "arguments": ["--out", "x", "-m", "--help"]}
        assert trace.manifest["run"] == told
    assert not Path("x").exists()


@pytest.mark.parametrize("module", ["nothing.at.all", "nothing", "json", "..x", "os.path.x"])
def test_a_module_that_cannot_be_run(halfulp: Halfulp, module: str) -> None:
    code, _, err = halfulp("audit", "-m", module)
    assert code == 2
    assert err.startswith("halfulp: no module named ")
    assert "Traceback" not in err


def test_a_package_that_fails_to_import_is_the_scripts_failure(halfulp: Halfulp) -> None:
    script("import nothing_of_this_name", "broken/__init__.py")
    script("", "broken/train.py")
    code, _, err = halfulp("audit", "-m", "broken.train")
    assert code == 1
    assert "No module named 'nothing_of_this_name'" in err
    assert "the script failed; no step was recorded" in err


def test_help_after_the_script_is_the_scripts(halfulp: Halfulp) -> None:
    """And its exit code, although no step was taken."""
    path = script("import argparse\nargparse.ArgumentParser(prog='mine').parse_args()")
    code, out, err = halfulp("audit", "--grids", "bf16", path, "--help")
    assert code == 0
    assert out.startswith("usage: mine")
    assert "never called an optimizer's step()" in err
    assert not Path("runs/train").exists()
    code, out, err = halfulp("audit", path, "--nonsense")
    assert code == 2
    assert "mine: error: unrecognized arguments: --nonsense" in err


def test_options_before_the_script_are_halfulps(halfulp: Halfulp) -> None:
    path = script(TRAIN)
    code, out, err = halfulp("audit", "--nonsense", path)
    assert code == 2
    assert "No such option: --nonsense" in err
    code, out, _ = halfulp("audit", "--help", path)
    assert code == 0
    assert "-m" in out
    code, _, err = halfulp("audit", "--grids", "bf16")
    assert code == 2
    assert "give a training script, -m and a module, or --run" in err
    assert halfulp("audit", "--grids=bf16", "--every=4", "--", path)[0] == 0
    assert hu.Trace.open("runs/train").steps.tolist() == [1, 5]


# ---- endings ---------------------------------------------------------------------------------------------

WAIT = """
    print("stepped", flush=True)
    import time
    while True:
        time.sleep(0.1)
"""


def started(folder: Path, text: str, *args: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "halfulp.cli", "audit", "--grids", "bf16", *args, "train.py"]
    place = environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")

    def listen() -> None:  # a shell's background jobs ignore it, and hand that on
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=place,
        preexec_fn=listen,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], number: int) -> str:
    """Send a signal when the script has stepped; what is on stderr in the end."""
    assert process.stdout is not None
    try:
        while "stepped" not in (line := process.stdout.readline()):
            assert line or process.poll() is None, process.communicate()[1]
        process.send_signal(number)
        return process.communicate(timeout=60)[1]
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_trace_and_a_verdict(number: int, tmp_path: Path) -> None:
    """Long before a part is due; the exit status is that of the signal."""
    process = started(tmp_path, TRAIN + WAIT)
    said = ended(process, number)
    assert process.returncode == -number
    assert hu.Trace.open(tmp_path / "runs" / "train").last_step == 8
    assert "the trace keeps what was recorded" in said
    assert "8 steps audited (to step 8)" in said
    assert "The trace is in runs/train." in said
    assert "Traceback" not in said


def test_a_signal_to_a_whole_job_leaves_a_trace_and_a_verdict(tmp_path: Path) -> None:
    """A cluster signals every process: workers of a DataLoader die, about which torch would raise."""
    loader = """
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, i):
            if i > 20:
                import time
                time.sleep(0.05)
            return torch.ones(8)
    for i, x in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if i == 5:
            print("stepped", flush=True)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN + loader))
    process = subprocess.Popen(
        [sys.executable, "-m", "halfulp.cli", "audit", "--grids", "bf16", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert process.stdout is not None
    while "stepped" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGTERM, said
    assert "steps audited" in said
    assert "The trace is in runs/train." in said
    assert hu.Trace.open(tmp_path / "runs" / "train").last_step >= 13


def test_a_signal_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    process = started(tmp_path, WAIT)
    ended(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert not (tmp_path / "runs" / "train").exists()


def test_a_handler_of_the_scripts_own_stays(tmp_path: Path) -> None:
    handler = """
    import signal
    def stop(number, frame):
        print("asked to stop", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, stop)
    """
    process = started(tmp_path, TRAIN + handler + WAIT)
    said = ended(process, signal.SIGTERM)
    assert process.returncode == 7
    assert "8 steps audited" in said
    assert hu.Trace.open(tmp_path / "runs" / "train").last_step == 8


def test_a_signal_waits_until_the_audit_has_recorded_its_step(tmp_path: Path) -> None:
    """Sent from a listener, in the middle of the audit's own work: the step is recorded, and the last."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done: list[int] = []

    def listen(summary: dict[str, Any]) -> None:
        if summary["step"] == 2:
            audit.when_idle(lambda: done.append(audit.step))
            assert not done

    with hu.Audit(optimizer, ["bf16"], model=model, listeners=[listen]) as audit:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert done == [2]


def test_the_script_is_main_until_the_interpreter_ends(tmp_path: Path) -> None:
    """Exit handlers find their own module, and pickles their classes."""
    late = """
    import atexit, pickle
    class Mine: pass
    def at_the_end():
        assert sys.modules["__main__"].Mine is Mine
        assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
        print("found", flush=True)
    atexit.register(at_the_end)
    """
    for ending, code in (("", 0), ("    raise KeyboardInterrupt", -signal.SIGINT)):
        process = started(tmp_path, f"{TRAIN}{late}\n{ending}\n")
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert out.endswith("found\n"), err


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


# ---- processes -------------------------------------------------------------------------------------------


def test_a_fork_does_not_write(tmp_path: Path) -> None:
    """A child that trains with the hooks it inherited leaves its parent's trace alone."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent(TRAIN)
        + textwrap.dedent("""
        import os, warnings
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            for _ in range(520):  # more than a part
                optimizer.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
        """)
    )
    command = [sys.executable, "-m", "halfulp.cli", "audit", "--grids", "bf16", "train.py"]
    place = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=place)
    assert done.returncode == 0, done.stderr
    assert hu.Trace.open(tmp_path / "runs" / "train").steps.tolist() == list(range(1, 10))


def test_two_ranks_of_a_launcher_leave_one_trace(tmp_path: Path) -> None:
    """``torchrun --no-python halfulp audit train.py``: ranks are known before there is a process group."""
    text = TRAIN.replace(
        "    optimizer = ",
        """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = """.lstrip("\n"),
    )
    end = "\ndist.destroy_process_group()\nimport time\ntime.sleep(0.3)\n"  # or torch's gloo may abort it
    (tmp_path / "train.py").write_text(textwrap.dedent(text) + end)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*launcher, "-m", "halfulp.cli", "audit", "--grids", "bf16", "--out", "trace", "train.py"]
    place = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=place)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("8 steps audited") == 1
    trace = hu.Trace.open(tmp_path / "trace")
    assert trace.last_step == 8
    assert trace.tensors[0]["name"] == "0.weight"


def test_that_kernels_are_compiled_is_said_once_a_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten processes, each with its own listener, beside one cache; where none can be kept, each says it."""
    from types import SimpleNamespace

    from halfulp.kernels.simd import _FirstCompilation

    def compiles(place: object, module: str = "halfulp.kernels.cpu") -> None:
        function = SimpleNamespace(__module__=module)
        cache = SimpleNamespace(cache_path=place)
        dispatcher = SimpleNamespace(py_func=function, _cache=cache)
        listener = _FirstCompilation()
        for _ in range(3):
            listener.on_start(SimpleNamespace(data={"dispatcher": dispatcher}))

    compiles(str(tmp_path / "cache"), "somebody.else")
    assert not caplog.records
    for _ in range(10):
        compiles(str(tmp_path / "cache"))
    assert len(caplog.records) == 1
    (tmp_path / "file").write_text("")
    for _ in range(2):
        compiles(str(tmp_path / "file" / "cache"))
    assert len(caplog.records) == 3
    compiles(None)  # a part of a kernel, which no cache has by itself
    assert len(caplog.records) == 3


# ---- compare ---------------------------------------------------------------------------------------------


def test_compare_a_forecast_with_its_outcome(halfulp: Halfulp) -> None:
    """The reference's projection beside the run on the grid, with the measures of the library."""
    from halfulp.audit.outcome import compare_grid

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
    assert "e4m3@128, scope all, 8 steps:" in out
    assert f"RMSE {rmse:.5f}" in out
    assert "majority: forecast step 1, measured step 1" in out
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
