"""What a format would cost: evaluations, the verdict, comparisons, scripts, the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import halfulp as hu
from halfulp.audit.rehearsal.forecast_outcome import compare_traces, rehearsed_outcomes
from halfulp.audit.script.own_evaluation import OwnEvaluation
from halfulp.audit.script.runner import file_name
from halfulp.errors import UsageError
from halfulp.report.charts import packed
from halfulp.report.page import page
from halfulp.verdicts import loss_costs as costs
from halfulp.verdicts.answer import verdict

SPECS = ["bf16", "e4m3@128", "e4m3@128:sr"]
UPDATES = 120


def target(x: torch.Tensor) -> torch.Tensor:
    return x[:, :10].argmax(dim=1)


def begun() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.cross_entropy(model(x), target(x))


def run(folder: Path, policy: str | None = None, grid: str = "e4m3@128", updates: int = UPDATES) -> hu.Trace:
    """A reference with rehearsals, or a run on a grid; evaluated every 40 updates."""
    model = begun()
    opt: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rehearse = SPECS if policy is None else None
    if policy is not None:
        opt = hu.WriteBack(opt, grid, policy, model=model)
    grids = [grid] if policy else ["bf16", "e4m3@128"]
    with hu.Audit(opt, grids, model=model, out=folder, rehearse=rehearse) as audit:
        for step in range(updates):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
            if (step + 1) % 40 == 0:
                with torch.no_grad():
                    audit.evaluate(lambda: loss_of(model, 10**6))
    return hu.Trace.open(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("costs")
    run(top / "reference")
    run(top / "nearest", "rne")
    run(top / "stochastic", "sr")
    return top


def opened(folder: Path, *names: str) -> list[hu.Trace]:
    return [hu.Trace.open(folder / name) for name in names]


def test_a_run_without_rehearsals_records_its_evaluations(folder: Path) -> None:
    reference, nearest = opened(folder, "reference", "nearest")
    assert list(nearest.real_losses()) == [40, 80, 120]
    assert list(reference.real_losses().values()) == reference.forecast("bf16").losses["real"][::3].tolist()
    assert nearest.rehearsals == []
    assert len(nearest.scan("losses"))


def test_a_trace_without_evaluations_has_no_table_of_them(tmp_path: Path) -> None:
    model = begun()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hu.Audit(opt, "bf16", model=model, out=tmp_path / "t"):
        loss_of(model, 0).backward()
        opt.step()
    trace = hu.Trace.open(tmp_path / "t")
    assert "losses" not in trace.documents[0].rows
    assert len(trace.real_losses()) == 0
    assert "What a format would cost" not in verdict(trace).text(verbose=True)


def test_the_verdict_orders_formats_by_their_loss(folder: Path) -> None:
    (trace,) = opened(folder, "reference")
    found = costs.costs(trace)
    assert [c.spec for c in found] == [c.spec for c in sorted(found, key=lambda c: c.loss)]
    assert found[-1].spec == "e4m3@128"
    assert found[-1].lower < found[-1].point < found[-1].upper  # type: ignore[operator]
    said = verdict(trace).text(verbose=True)
    assert "a forecast from this one run, with bounds as observed, not proved" in said
    heading = "What a format would cost, in loss"
    prices = said[said.index(heading) :]
    assert prices.index("bf16  ") < prices.index("\n  e4m3@128  ")
    last = verdict(trace).text().split(heading)[1].splitlines()
    assert last[-1].strip() == costs.PILOT
    (line,) = (x for x in last if x.startswith("  e4m3@128  "))
    assert line.split()[1:3] == [f"{found[-1].gap:+.3f}", f"({found[-1].interval[0]:+.3f}"]  # type: ignore[index]
    assert "saves 3 bytes per weight" in line


def test_without_an_evaluation_it_is_said_what_is_missing(tmp_path: Path) -> None:
    model = begun()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hu.Audit(opt, "bf16", model=model, out=tmp_path / "t", rehearse="bf16"):
        loss_of(model, 0).backward()
        opt.step()
    said = verdict(hu.Trace.open(tmp_path / "t")).text(verbose=True)
    assert "Rehearsed: bf16, but no loss is forecast" in said
    assert "--evaluate FUNCTION" in said
    assert "no loss is forecast" in page([tmp_path / "t"])


# ---- beside a measured run -------------------------------------------------------------------------------


def test_a_rehearsal_is_compared_with_the_run_that_it_was_of(folder: Path) -> None:
    reference, nearest, sr = opened(folder, "reference", "nearest", "stochastic")
    (found,) = rehearsed_outcomes(reference, nearest)
    assert found.spec == "e4m3@128"
    assert [e.step for e in found.losses] == [40, 80, 120]
    assert list(found.comparisons) == ["lower", "point", "upper"]
    assert all(e.inside for e in found.losses)
    assert found.comparisons["point"].rmse < found.comparisons["lower"].rmse
    (other,) = rehearsed_outcomes(reference, sr)
    assert other.spec == "e4m3@128:sr"
    made = compare_traces(reference, nearest, scope="all-2d")
    said = "\n".join(line for outcome in made for line in outcome.lines)
    assert "e4m3@128 as rehearsed, scope all-2d, 120 steps:" in said
    assert "inside the bracket at 3 of 3 common evaluations" in said
    model = torch.nn.Linear(4, 4)
    opt = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=0.1), "e4m3@128", "rne", model=model)
    memory = hu.Memory()
    with hu.Audit(opt, "e4m3@128", model=model, out=memory):
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
    with pytest.raises(UsageError, match="not of the same model"):
        rehearsed_outcomes(reference, memory.trace)


def test_the_page_sets_forecast_and_measured_side_by_side(folder: Path) -> None:
    text = page([folder / n for n in ("reference", "nearest", "stochastic")])
    assert "What it would cost, in loss" in text
    assert "that came out inside their brackets: " in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    # The share that is lost: projected, rehearsed and measured, in one chart.
    (outcome,) = data["outcomes"]
    forecast = hu.Trace.open(folder / "reference").forecast("e4m3@128")
    assert outcome["rehearsed"] == packed(forecast.frozen("all-2d"))
    assert outcome["forecast"] == packed(forecast.frozen("all-2d", "lower"))
    assert outcome["rehearsed"] not in (outcome["forecast"], outcome["measured"])
    assert "The rehearsal, which remembers what was lost, was off by " in text


# ---- scripts ---------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
model.append(torch.nn.Linear(10, 10, bias=False))
model.append(torch.nn.Identity())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step, calls = -1, []


class Loop:
    @torch.no_grad()
    def evaluate(self):
        print("evaluating")
        if "--once" in sys.argv and step in calls:
            raise RuntimeError("only once")
        calls.append(step)
        x = torch.randn(64, 32)
        return {"val": torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1)), "other": 0.0}


loop = Loop()
print(loop.evaluate())
for step in range(20):
    x = torch.randn(64, 32)
    loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(step, loop.evaluate())
print(torch.rand(()).item(), *(t.double().sum().item() for t in model.state_dict().values()))
"""


def audited(where: Path, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (where / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "halfulp", "audit", *options, "train.py", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=240)


def test_a_script_evaluates_as_if(tmp_path: Path) -> None:
    """It says what it says alone, to the last bit; its trace has the losses, its folder the weights."""
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    options = ("--rehearse", "e4m3@128,int8/row", "--evaluate", "Loop.evaluate:val", "--grids", "bf16")
    done = audited(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    trace = hu.Trace.open(tmp_path / "runs" / "train")
    assert trace.grids == ["bf16", "e4m3@128", "int8/row"]
    assert trace.forecast("e4m3@128").losses["step"].tolist() == [10] * 3 + [20] * 3
    assert "What a format would cost" in done.stderr
    assert f"are in {Path('runs/train/as_if')}" in done.stderr
    files = {f.name for f in (tmp_path / "runs" / "train" / "as_if").iterdir()}
    names = [file_name(s) for s in ("e4m3@128", "int8/row")]
    assert files == {f"{n}.{b}.safetensors" for n in names for b in ("lower", "point", "upper")}
    saved = load_file(tmp_path / "runs" / "train" / "as_if" / "e4m3@128.point.safetensors")
    assert {"0.weight", "1.running_mean", "3.weight"} <= set(saved)  # buffers, too
    assert torch.equal(hu.grid("e4m3@128").round(saved["0.weight"]), saved["0.weight"])
    again = audited(
        tmp_path, *options, "--resume"
    )  # its evaluations of steps that are held are its own alone
    assert again.returncode == 0, again.stderr
    assert again.stdout == plain.stdout
    assert trace.forecast("e4m3@128").losses.equals(
        hu.Trace.open(tmp_path / "runs" / "train").forecast("e4m3@128").losses.to_polars()
    )


def test_an_evaluation_that_fails_the_second_time_is_left_alone(tmp_path: Path) -> None:
    options = ("--rehearse", "e5m2", "--evaluate", "Loop.evaluate:val", "--grids", "bf16", "--no-weights")
    done = audited(tmp_path, *options, arguments=("--once",))
    assert done.returncode == 0, done.stderr
    plain = subprocess.run(
        [sys.executable, "train.py", "--once"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == plain.stdout  # and the random numbers after it
    assert done.stderr.count("could not be called again as if (RuntimeError: only once)") == 1
    trace = hu.Trace.open(tmp_path / "runs" / "train")
    assert sorted(trace.real_losses()) == [10, 20]
    assert len(trace.forecast("e5m2").losses) == 0
    assert not (tmp_path / "runs" / "train" / "as_if").exists()


def test_names_of_evaluations() -> None:
    for text, said in (("", "takes a function"), ("a b", "takes a function"), (":val", "takes a function")):
        with pytest.raises(UsageError, match=said):
            OwnEvaluation.of(text)
    with pytest.raises(UsageError, match=r"no such function; it has Loop\.evaluate\."):
        OwnEvaluation.of("evaluate").compiled(SCRIPT, "train.py")
    own = OwnEvaluation.of("f:1")
    assert own.number((1.0, torch.tensor(2.0))) == 2.0
    assert OwnEvaluation.of("f").number(torch.tensor([3.0])) == 3.0
    for name, given, said in (
        ("f", {"val": 1.0}, "a dictionary of val"),
        ("f:7", [1.0], "1 values, which count from 0"),
        ("f", None, "gives nothing"),
    ):
        with pytest.raises(UsageError, match=said):
            OwnEvaluation.of(name).number(given)


def test_a_function_of_a_package_is_taken_as_if_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as transformers.Trainer.evaluate, of which the script itself has no line."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package_of_a_trainer").mkdir()
    (tmp_path / "package_of_a_trainer" / "__init__.py").write_text("")
    inner = "class Trainer:\n    def evaluate(self, model):\n        "
    inner += "return {'loss': model.weight.detach().norm().item()}"
    (tmp_path / "package_of_a_trainer" / "loops.py").write_text(inner)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnEvaluation.of("package_of_a_trainer.loops.Trainer.evaluate:loss")
    own.compiled("x = 1", "train.py")
    from package_of_a_trainer.loops import Trainer  # type: ignore[import-not-found]  # made above

    with hu.Audit(optimizer, ["bf16"], model=model, rehearse=["e5m2"], out=tmp_path / "out") as own.audit:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        given = Trainer().evaluate(model)
    assert given == {"loss": model.weight.detach().norm().item()}
    assert set(hu.Trace.open(tmp_path / "out").forecast("e5m2").losses["bound"]) == {
        "lower",
        "point",
        "upper",
    }
    own.put_back()
    assert Trainer.evaluate.__qualname__ == "Trainer.evaluate"
    assert not hasattr(Trainer.evaluate, "__wrapped__")
    for name in ("package_of_a_trainer.loops.Trainer.other", "no_such_package.evaluate"):
        with pytest.raises(UsageError, match=r"no such function; it has none\. A function of a package"):
            OwnEvaluation.of(name).compiled("x = 1", "train.py")


def test_numbers_that_no_rehearsal_changed_are_not_called_a_forecast() -> None:
    """As where the function evaluates a model that was loaded again, not the one that is trained."""
    same = costs.Cost(spec="e5m2", step=5, real=1.25, lower=1.25, point=1.25, upper=1.25)
    other = costs.Cost(spec="bf16", step=5, real=1.25, lower=1.25, point=None, upper=1.26)
    (said,) = costs.cautions([same])
    assert said.startswith("Not one rehearsal changed this number.")
    assert costs.cautions([same, other]) == []


def test_a_forecast_beyond_its_bracket_says_so() -> None:
    made = [
        costs.Cost(spec=f"m{k}", step=5, real=1.0, lower=1.1, point=point, upper=1.2)
        for k, point in enumerate((1.1, 1.15, 1.2004, 1.0996, 1.202, 1.05))
    ]
    (said,) = costs.cautions(made)
    assert said.startswith("m4, m5: the forecast is beyond its bracket")


def test_of_two_calls_at_a_step_the_last_counts_and_this_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnEvaluation("evaluate")
    evaluate = own(lambda: 1.0)
    with hu.Audit(optimizer, ["bf16"], model=model) as own.audit:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            assert evaluate() == 1.0
        assert capsys.readouterr().err == ""
        assert evaluate() == evaluate() == 1.0
    assert capsys.readouterr().err == (
        "halfulp: evaluate() was called twice at step 2: of those the last counts.\n"
    )


def test_a_loss_that_is_only_printed_is_a_variable_of_the_function() -> None:
    said = '    """Says it."""\n    loss = 2.0 * x\n    if x > 5:\n        return\n    print(loss)\n'
    source = f"def test(x):\n{said}"

    def compiled(name: str) -> tuple[OwnEvaluation, Any]:
        own = OwnEvaluation.of(name)
        main: dict[str, Any] = {"__halfulp_evaluated__": own}
        exec(own.compiled(source, "train.py"), main)  # noqa: S102  # as a script's file is
        return own, main["test"]

    own, test = compiled("test:loss")
    for x in (1.5, 7.0):
        assert own.number(test(x)) == 2.0 * x
    assert test.__doc__ == "Says it."
    own, test = compiled("test:los")
    with pytest.raises(UsageError, match=r"gives nothing, .*nor is a variable of its one.*only prints"):
        own.number(test(1.0))


def test_as_if_calls_that_a_budget_does_not_pay_are_put_off_to_the_end(tmp_path: Path) -> None:
    def run(name: str, most: float, steps: int = 10) -> tuple[hu.Trace, float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own = OwnEvaluation("evaluate", most=most)
        evaluate = own(lambda: model(torch.randn(8, 32)).square().mean().item())
        audit = hu.Audit(optimizer, ["bf16"], model=model, rehearse=["e5m2"], out=tmp_path / name)
        own.audit = audit
        with audit, own.until_the_end():
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
                if step in (3, 6, 10):
                    evaluate()
        return hu.Trace.open(tmp_path / name), float(torch.rand(()))

    (every, drawn), (last, same) = run("every", float("inf")), run("last", 0.0)
    assert drawn == same
    assert every.real_losses() == last.real_losses()
    rows = [set(t.forecast("e5m2").losses.rows()) for t in (every, last)]
    assert rows[1] == {row for row in rows[0] if row[0] != 6}
    on, _ = run("on", 0.0, steps=11)  # the weights of the last evaluation are gone
    assert set(on.forecast("e5m2").losses["step"].tolist()) == {3}
