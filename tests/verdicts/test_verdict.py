"""What the verdict says of runs that nobody wants to have, and what it advises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import batches, made, train
from report_traces import HOSTILE, inventory, synthetic

import halfulp as hu
from halfulp.report.gather import gather
from halfulp.report.live import LiveView
from halfulp.report.page import open_traces, page
from halfulp.report.tensors_csv import tensors_csv
from halfulp.trace.stored_on import on_grid
from halfulp.verdicts.findings import NOT_FINITE, copies, cures, findings


def recorded(out: Path, model: Any, optimizer: Any, steps: int = 4, **options: Any) -> hu.Trace:
    """A run of a model that has a loss, on its own batches."""
    grids = options.pop("grids", ["bf16", "e5m2"])
    with hu.Audit(optimizer, grids, model=model, out=out, **options) as audit:
        train(model, optimizer, steps, audit=audit, scheduled=False)
    return hu.Trace.open(out)


def said(trace: hu.Trace) -> str:
    return hu.verdict(trace).text(verbose=True)


def test_the_verdict_is_one_call_away(tmp_path: Path) -> None:
    """What the command line prints, and the numbers behind it."""
    model = made("mlp")
    trace = recorded(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = hu.verdict(trace)
    assert str(found) == repr(found) == "\n".join(found.lines)
    assert [f.grid for f in found.findings] == ["bf16", "e5m2"]
    assert found.findings[0].lost == pytest.approx(trace.frozen("bf16").mean(), abs=0.01)


# ---- containers and sizes --------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """A model in any dtype with an empty parameter, used like the others."""

    def __init__(self, dtype: torch.dtype, *, only_empty: bool = False) -> None:
        super().__init__()
        self.none = torch.nn.Parameter(torch.empty(0, 4, dtype=dtype))
        if not only_empty:
            self.fc = torch.nn.Linear(8, 8, dtype=dtype)

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(4, 8, generator=generator).to(self.none.dtype)
        return (self.fc(x).square().mean() if hasattr(self, "fc") else 0.0) + self.none.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_container_and_an_empty_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    """Verdict, page, table and live view of a run in float64, with a tensor that has no weights."""
    torch.manual_seed(0)
    model = Odd(dtype)
    heard: list[dict[str, Any]] = []
    with LiveView(lines=True) as view:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trace = recorded(tmp_path / "run", model, optimizer, listeners=[heard.append, view])
    assert [t["name"] for t in trace.tensors] == ["fc.weight", "fc.bias"]
    assert set(heard[-1]["tensors"]) == {"fc.weight", "fc.bias"}
    assert "2 tensors, 72 weights" in said(trace)
    home = on_grid(trace, "bf16")
    assert len(home) == (2 if dtype == torch.bfloat16 else 0)
    assert gather(trace).findings() == findings(trace)
    page([trace.path])
    tensors_csv(open_traces([trace]))


def test_weights_on_the_grid_that_no_step_is_about(tmp_path: Path) -> None:
    """A part of the model that is not used: nothing is said of it, and the rest is told."""
    model = torch.nn.ModuleDict(
        {"unused": torch.nn.Linear(16, 16).bfloat16(), "used": torch.nn.Linear(16, 16)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "run", states=True):
        for _ in range(3):
            optimizer.zero_grad()
            model["used"](torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
    lines = hu.verdict(hu.Trace.open(tmp_path / "run")).details
    assert any(line.startswith("bf16: ") and "would be lost" in line for line in lines)


def test_names_of_full_precision(tmp_path: Path) -> None:
    """Weights that are stored on fp32 have proposals of zero that are known."""
    model = made("mlp")
    optimizer = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=0.1), "fp32", "rne", model=model)
    trace = recorded(tmp_path / "run", model, optimizer, grids=["fp32", "bf16"])
    assert len(trace.in_full()) == len(trace.tensors)
    assert len(on_grid(trace, "fp32")) == len(trace.tensors)
    assert "fp32: " in said(trace)


def test_a_run_of_empty_tensors(tmp_path: Path) -> None:
    model = Odd(torch.float32, only_empty=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert said(recorded(tmp_path / "run", model, optimizer)) == "No step was recorded."


def test_traces_that_hold_empty_tensors(tmp_path: Path) -> None:
    """As were recorded before empty ones were left out: among others, and alone."""
    listed = inventory([("a", "mlp", (4, 4)), ("none", "other", (0, 4)), ("b", "norm", (4,))])
    trace = synthetic(tmp_path / "some", listed=listed, grids=["bf16", "e5m2"], steps=12)
    assert np.isfinite(trace.frozen("bf16")).all()
    assert gather(trace).findings() == findings(trace)
    assert "2 tensors, 20 weights" in said(trace)
    page([trace.path])
    tensors_csv(open_traces([trace]))
    alone = synthetic(tmp_path / "alone", listed=inventory([("none", "other", (0, 4))]), grids=["bf16"])
    assert said(alone) == "Nothing was recorded: none of the tensors has a weight."
    with pytest.raises(hu.UsageError, match="no tensor with a weight"):
        page([alone.path])


# ---- what is not finite ----------------------------------------------------------------------------------


def spoilt(out: Path, bad: dict[int, list[str]], steps: int = 6) -> hu.Trace:
    """A run in which gradients of some tensors are NaN at some steps; weights are put back after them."""
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=out):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model.loss(batches(step)).backward()
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name in bad.get(step, ()):
                model.get_parameter(name).grad.fill_(torch.nan)
            optimizer.step()
            with torch.no_grad():
                for name in bad.get(step, ()):
                    model.get_parameter(name).copy_(before[name])
    return hu.Trace.open(out)


def test_what_is_not_finite_comes_first(tmp_path: Path) -> None:
    trace = spoilt(tmp_path / "run", {3: ["fc1.weight"], 4: ["fc1.weight", "fc2.bias"], 5: ["fc1.weight"]})
    first = hu.verdict(trace).lines[0]
    assert first.startswith("NOT FINITE: 2,910 weights or proposals were NaN or infinite at 3 steps, ")
    assert "first at 3, last at 5, in 2 of 9 tensors (fc1.weight, fc2.bias)." in first
    html = page([trace.path])
    assert html.index("NOT FINITE: 2,910") < html.index("<h1>")


def test_shares_are_of_finite_updates(tmp_path: Path) -> None:
    """By brute force from the tables; the page says the same."""
    trace = spoilt(tmp_path / "run", {step: ["fc2.weight"] for step in range(4, 7)})
    assert "from step 4 on, in 1 of 9 tensors (fc2.weight)" in hu.verdict(trace).lines[0]
    tensors = trace.scan("tensors").to_polars()
    counts = trace.table().to_polars().filter(grid="bf16").group_by("step").agg(frozen="frozen").sort("step")
    expected = []
    for step, frozen in counts.iter_rows():
        zero, bad = tensors.filter(step=step).select("zero_proposal", "nonfinite").sum().row(0)
        expected.append((sum(frozen) - zero) / (trace.numel() - zero - bad))
    assert trace.frozen("bf16").tolist() == expected
    assert hu.verdict(trace).findings[0].lost == pytest.approx(np.mean(expected), rel=1e-12)
    assert gather(trace).findings() == findings(trace)


def test_nothing_is_said_of_a_run_without_a_finite_update(tmp_path: Path) -> None:
    """It was a clean bill: 0.0% of updates would be lost."""
    everything = [n for n, _ in made("mlp").named_parameters()]
    trace = spoilt(tmp_path / "run", dict.fromkeys(range(1, 5), everything), steps=4)
    text = said(trace)
    assert text.startswith(
        f"NOT FINITE: {4 * trace.numel():,} weights or proposals were NaN or infinite from"
    )
    assert "(fc1.weight, fc1.bias, norm.weight and 6 more)" in text
    assert "bf16: nothing can be said, because no proposal was finite." in text
    assert "of updates" not in text.split("How sure")[0].split("\n", 1)[1]
    assert all(np.isnan(f.lost) and f.severity == NOT_FINITE for f in hu.verdict(trace).findings)
    html = page([trace.path])
    assert "<h1>Nothing can be said: no proposal was finite.</h1>" in html
    tensors_csv(open_traces([trace]))


def test_a_run_that_is_hardly_ever_finite_gets_no_fix_for_its_rounding() -> None:
    """All is NaN from the second step on; what the first lost is not why."""
    torch.manual_seed(0)
    model, memory = torch.nn.Linear(32, 32).half(), hu.Memory()
    with torch.no_grad():
        model.bias.fill_(1.0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with hu.Audit(opt, "fp16", model=model, out=memory):
        for step in range(8):
            for p in model.parameters():
                p.grad = torch.full_like(p, float("nan") if step else 1.0)
            opt.step()
    answer = hu.verdict(memory.trace)
    assert answer.headline.startswith(
        "Most weights or updates were not finite (8 steps): the run failed; of "
    )
    assert answer.notices[0].startswith("NOT FINITE: ")
    assert answer.fix is None


# ---- advice ----------------------------------------------------------------------------------------------


class Signed(torch.optim.Optimizer):
    """One that nobody here knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign() * 1e-5)


OFFERED = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-5),
    "Adam without a first moment": lambda p: torch.optim.Adam(p, lr=1e-5, betas=(0.0, 0.99)),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-5),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-5),
    "Signed": Signed,
}


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_offered_is_what_a_write_back_takes(name: str, tmp_path: Path) -> None:
    """The optimizer at hand was asked when the run was recorded."""
    model = made("mlp")
    trace = recorded(tmp_path / "run", model, OFFERED[name](model.parameters()), grids=["e4m3@128"])
    offers = {policy.split()[0] for policy, _ in cures(trace, "e4m3@128")}
    for policy in ("sr", "eco", "kahan", "master"):
        model = made("mlp")
        try:
            hu.WriteBack(OFFERED[name](model.parameters()), "e4m3@128", policy, model=model)
            taken = True
        except hu.UsageError:
            taken = False
        assert (policy in offers) == taken, policy
    assert ("eco 1" in said(trace)) == ("eco" in offers) == (", eco 1, master" in page([trace.path]))


def test_old_traces_offer_what_any_optimizer_takes(tmp_path: Path) -> None:
    trace = synthetic(tmp_path / "run", grids=["e4m3@128"])
    assert [p for p, _ in cures(trace, "e4m3@128")] == ["sr", "kahan in bfloat16", "kahan", "master"]


def test_bf16_parameters_get_one_line(tmp_path: Path) -> None:
    model = made("mlp").bfloat16()
    model.loss = lambda g: model(torch.randn(8, 16, generator=g).bfloat16()).square().mean()
    trace = recorded(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=1e-6))
    text = said(trace)
    assert text.count('optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)') == 1
    assert "Masters are there already" not in text


@pytest.mark.parametrize("given", [True, False])
def test_masters_that_are_there_already(given: bool, tmp_path: Path) -> None:
    """fp32 main parameters, copied into a bf16 model after each step: they are named like the model's."""
    model = made("mlp").bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    with hu.Audit(optimizer, ["bf16"], model=model if given else None, out=tmp_path / "run"):
        for step in range(4):
            x = torch.randn(8, 16, generator=batches(step)).bfloat16()
            model(x).square().mean().backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)
    trace = hu.Trace.open(tmp_path / "run")
    assert [t["name"] for t in trace.tensors] == [n for n, _ in model.named_parameters()]
    assert {t["copy"] for t in trace.tensors} == {"bfloat16"}
    text = said(trace)
    assert "The optimizer steps a float32 copy; the model holds bfloat16. Masters are there already" in text
    assert "what would be lost without that copy" in text
    assert (
        "would keep them, in bytes per weight when stored packed: sr 2; eco 2; kahan in bfloat16 4; kahan 6\n"
        in text
    )
    html = page([trace.path])
    assert "Masters are there already" in html
    assert "fp32 masters</th>" not in html


def test_a_model_that_the_optimizer_steps_itself_has_no_masters(tmp_path: Path) -> None:
    """A bf16 copy beside it (an average, an inference copy) does not make it one."""
    model = made("mlp")
    beside = made("mlp").bfloat16()
    trace = recorded(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert not copies(trace)
    assert beside is not model


# ---- what exact means ------------------------------------------------------------------------------------


def test_a_coarser_grid_sees_the_change_that_bf16_left(tmp_path: Path) -> None:
    """By brute force: d is after - before in bf16, z = q + d in bf16, whatever the optimizer asked for."""
    torch.manual_seed(0)
    p = torch.nn.Parameter((0.1 * torch.randn(64, 256)).bfloat16())
    before, grid = p.detach().clone(), hu.grid("e4m3@128")
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.grad = (2e-3 * torch.randn(64, 256)).bfloat16()
    with hu.Audit(optimizer, ["e4m3@128", "bf16"], out=tmp_path / "run"):
        optimizer.step()
    trace = hu.Trace.open(tmp_path / "run")
    d = p.detach() - before
    q = grid.round(before)
    frozen = int((grid.round(q + d) == q).sum())
    assert d.dtype == q.dtype == torch.bfloat16
    assert trace.frozen("e4m3@128").tolist() == [frozen / p.numel()]
    asked = -p.grad.float()
    exact = grid.round(before.float())
    assert frozen != int((grid.round(exact + asked) == exact).sum())  # what a float32 optimizer would do
    assert "Weights are stored in bfloat16: the change is the one that was left after that rounding" in said(
        trace
    )
    assert "Rounded before: " in page([trace.path])


def test_full_precision_needs_no_such_words(tmp_path: Path) -> None:
    model = made("mlp")
    trace = recorded(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert "left after that rounding" not in said(trace)
    assert "Rounded before: " not in page([trace.path])


# ---- scopes and names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (("mlp", "mlp"), None),
        (("other", "other"), None),
        (("mlp", "other"), "  mlp alone: "),
        (("attention", "other"), "  attention alone: "),
        (("attention", "mlp"), None),
    ],
)
def test_a_leading_scope_is_one_that_exists(
    groups: tuple[str, str], line: str | None, tmp_path: Path
) -> None:
    """Attention and mlp are spoken of where there are any, and where they are not everything. A page begins
    with the weights that the verdict is about."""
    listed = inventory([("a", groups[0], (8, 8)), ("b", groups[1], (8, 8))])
    trace = synthetic(tmp_path / "run", listed=listed, grids=["bf16"], steps=5)
    alone = [text for text in hu.verdict(trace).details if "alone:" in text]
    assert [text.startswith(line or "") for text in alone] == ([] if line is None else [True])
    data = json.loads(page([trace.path]).split('id="data">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert run["scopes"][run["scope"]] == "all"


def test_nothing_that_a_manifest_says_reaches_a_terminal(tmp_path: Path) -> None:
    trace = synthetic(tmp_path / "run", listed=inventory([(n, n, (8, 8)) for n in HOSTILE]), grids=["bf16"])
    trace.manifest["optimizers"] = [{"class": "X", "policies": ["sr\x1b[31m"]}]
    for tensor in trace.manifest["tensors"]:
        tensor["copy"] = "bf16\x1b[2J"
    assert "\x1b" not in said(trace)


def test_names_of_tensors_and_groups_cannot_move_a_cursor() -> None:
    """What a write-back prints of itself and of its last step."""
    named = [(f"{i}.{text}", torch.nn.Parameter(torch.ones(4, 4))) for i, text in enumerate(HOSTILE)]
    inner = torch.optim.SGD([{"params": named, "label": HOSTILE[10]}], lr=1e-3)
    optimizer = hu.WriteBack(inner, "bf16", "rne")
    for _, p in named:
        p.grad = torch.ones(4, 4)
    optimizer.step()
    for text in (str(optimizer.events), repr(optimizer)):
        assert not {c for c in text if c != "\n" and not c.isprintable()}
    assert len(str(optimizer.events).splitlines()) == 1 + len(HOSTILE)
    assert max(map(len, str(optimizer.events).splitlines())) < 250


def test_a_folder_stands_for_its_trace(tmp_path: Path) -> None:
    trace = synthetic(tmp_path / "run", grids=["bf16"], steps=2)
    assert str(hu.verdict(str(trace.path))) == str(hu.verdict(trace.path)) == str(hu.verdict(trace))


@pytest.mark.parametrize(("sign", "nothing"), [(1, True), (-1, False)])
def test_updates_that_cannot_arrive_under_sr_are_no_clean_bill(sign: int, nothing: bool) -> None:
    """The largest weight of an MX block can fall but not rise, as its scale is rounded down."""
    torch.manual_seed(0)
    w, memory = torch.nn.Parameter(torch.full((256, 32), 6 * 2.0**-6)), hu.Memory()
    opt = hu.WriteBack(torch.optim.SGD([w], lr=1e-3), "mxfp4", "sr")
    with hu.Audit(opt, "mxfp4", out=memory):
        for _ in range(50):
            w.grad = torch.full_like(w, -sign)
            opt.step()
    answer = hu.verdict(memory.trace)
    assert answer.headline.startswith("Updates do not arrive: sr write-back to mxfp4 wrote 0% of") == nothing
    assert answer.headline.startswith("Nothing lost: sr write-back") != nothing
    assert bool(answer.section("Why")) == nothing
