"""``halfulp audit`` on scripts that know nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from audit_command import TRAIN, Halfulp, environment, script

import halfulp as hu

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
    run = trace.scan("run").to_polars()
    assert [f"{s} {x}" for s, x in run.iter_rows()] == out.splitlines()
    assert [t["name"] for t in trace.tensors] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert [t["group"] for t in trace.tensors] == ["other", "other", "norm", "norm", "other", "other"]
    assert trace.grids == ["bf16", "fp16", "e5m2", "e4m3@128"]
    caller = trace.manifest["run"].pop("caller")
    names = {"model": "model", "optimizer": "optimizer"}
    assert caller == {"framework": "loop", "names": names, "whole": True}
    assert trace.manifest["run"] == {"script": "train.py", "arguments": []}
    assert "Stored in bf16, this run would lose " in err
    assert "1 norm gain 100% (still at its start)" in err
    assert "8 steps audited. " in err
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
    assert trace.manifest["run"].pop("caller")["names"] == {"optimizer": "o"}
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
    code, _, err = halfulp("audit", "--grids", "m20", "--verbose", path)
    assert code == 0
    assert "Nothing found: this run would lose 0% of its updates in m20 (5 steps)." in err
    assert "m20: 0.0% of updates would be lost" in err
    assert "98.0% of the proposals were zero, with nothing to lose" in err
    assert hu.Trace.open("runs/train").frozen("m20", of="weights")[-1] == 0.98  # the event itself counts them


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
    code, _, err = halfulp("audit", "--grids", "e4m3@128", "--verbose", path)
    assert code == 0
    assert said in err
    assert ("This run LOST 100% of its e4m3@128 updates" in err) == (policy == "rne")
    assert ("Nothing lost: sr write-back carries the updates to e4m3@128" in err) == (policy == "sr")
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
    run = hu.Trace.open("runs/train").scan("run").to_polars()
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
    run = hu.Trace.open("runs/train").scan("run").to_polars()
    assert [f"{s} {x}" for s, x in run.iter_rows()] == out.splitlines()


def test_a_bfloat16_script_needs_no_other_command(halfulp: Halfulp) -> None:
    """Of the usual grids, what bfloat16 cannot hold is left out; asked for, it is refused."""
    text = TRAIN.replace("optimizer =", "model.bfloat16()\n    optimizer =")
    text = text.replace("torch.randn(16, 8)", "torch.randn(16, 8).bfloat16()")
    path = script(text)
    code, out, err = halfulp("audit", path)
    assert code == 0
    assert len(out.splitlines()) == 8
    assert "fp16" not in err
    assert "weights and AdamW's state are bfloat16, no fp32 master" in err
    assert "This run LOST" in err
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
        assert trace.manifest["run"].pop("caller")["framework"] == "loop"
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


OWN = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--grids")
    parser.add_argument("--no-weights", action="store_true")
    print(parser.parse_args())
"""


def test_options_of_halfulp_after_the_script_are_pointed_out(halfulp: Halfulp) -> None:
    """The script may have an option of that name: it gets it, and one line says so."""
    path = script(OWN + TRAIN)
    code, out, err = halfulp("audit", "--every", "2", path, "--grids=bf16", "--no-weights")
    assert code == 0
    assert out.startswith("Namespace(grids='bf16', no_weights=True)")
    assert hu.Trace.open("runs/train").grids[0] == "bf16"
    assert len(hu.Trace.open("runs/train").grids) > 1  # the default, not what the script was given
    (said,) = [line for line in err.splitlines() if "passed to" in line]
    assert said == (
        "halfulp: --grids, --no-weights: passed to train.py, like everything after its name. Options "
        "for halfulp go before it: halfulp audit --grids --no-weights ... --every 2 train.py"
    )
    for args in (["--grids", "bf16", path], ["--", path, "--grids", "bf16"], [path, "grids"]):
        assert "passed on" not in halfulp("audit", *args)[2]
    assert "--grids: passed to train, like" in halfulp("audit", "-m", "train", "--grids", "bf16")[2]


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
