"""The recorder against brute force: which tensors, which numbers, and a run that is not touched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from audit_reference import (
    GRIDS,
    MODELS,
    OPTIMIZERS,
    STATIC,
    Brute,
    batches,
    made,
    rates,
    train,
    weights,
)

import halfulp as hu
from halfulp import files, kernels
from halfulp.audit.sinks import trace_sink
from halfulp.trace import TraceWriter
from halfulp.verdicts.findings import findings

# ---- every number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_number_is_that_of_brute_force(kind: str, name: str, tmp_path: Path) -> None:
    """Counts, phase and expectation of every tensor, grid and step; sums, rates and losses."""
    model = made(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    brute = Brute(GRIDS)
    with hu.Audit(
        optimizer, GRIDS, expected_never_moved=True, model=model, out=tmp_path / "trace", part_steps=2
    ) as audit:
        train(model, optimizer, 4, brute=brute, audit=audit)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))
    assert len(brute.informative()) >= 10  # numbers that could have been wrong


def test_float64_weights(tmp_path: Path) -> None:
    model = made("mlp").double()
    generator = batches()
    model.loss = lambda _: model(torch.randn(8, 16, generator=generator, dtype=torch.float64)).square().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 4, brute=brute, audit=audit)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_proposals_that_are_not_finite_are_counted_and_nothing_else(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    brute = Brute(GRIDS)
    with hu.Audit(optimizer, GRIDS, expected_never_moved=True, model=model, out=tmp_path / "trace"):
        for step, bad in enumerate((torch.inf, torch.nan, 1.0), start=1):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=batches(step))
            model.fc2.weight.grad[3, 4] = bad
            before, lr = weights(model), rates(model, optimizer)
            optimizer.step()
            brute.step(step, before, weights(model), lr)
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    rows = trace.scan("tensors").to_polars()
    bad_counts = rows.group_by("tensor", maintain_order=True).agg("nonfinite")
    assert dict(bad_counts.iter_rows()) == {i: [1, 1, 1] if i == 4 else [0, 0, 0] for i in range(9)}


# ---- the run is not touched ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_run_is_bitwise_the_same_without_the_audit(kind: str, name: str, tmp_path: Path) -> None:
    """Weights, gradients, losses, optimizer state and every random generator."""
    runs = []
    for audited in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        model = made(kind)
        optimizer = OPTIMIZERS[name](model.parameters())
        audit = hu.Audit(
            optimizer,
            GRIDS,
            model=model,
            out=tmp_path / "trace",
            decay=True,
            scores=("e4m3", 2, 3),
        )
        if audited:
            audit.start()
        losses = train(model, optimizer, 3, audit=audit if audited else None)
        if audited:
            audit.stop()
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        generators = (torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64)))  # noqa: NPY002
        runs.append(([*weights(model).values(), *state, *grads, *generators], losses, random.getstate()))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1:] == runs[1][1:]


# ---- which tensors, which numbers ------------------------------------------------------------------------


def test_tied_frozen_and_unused_tensors(tmp_path: Path) -> None:
    """A tied tensor is there once, under its first name; one without a gradient is in the inventory only."""
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    names = [t["name"] for t in trace.tensors]
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names == trainable
    assert "wte.weight" in names
    assert "lm_head.weight" not in names
    assert "still" not in names
    assert set(trace.table().to_polars()["tensor"]) == set(trainable) - {"unused"}


def test_groups_and_scopes(tmp_path: Path) -> None:
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    groups = {t["name"]: t["group"] for t in trace.tensors}
    assert groups["wte.weight"] == groups["wpe.weight"] == "embedding"
    assert groups["h.0.attn.c_attn.weight"] == groups["h.0.attn.c_proj.bias"] == "attention"
    assert groups["h.0.mlp.0.weight"] == groups["h.0.mlp.2.weight"] == "mlp"
    assert groups["h.0.ln_1.weight"] == groups["ln_f.bias"] == "norm"
    assert groups["unused"] == "other"
    table = trace.table().to_polars().filter((pl.col("grid") == "e5m2") & (pl.col("step") == 2))
    core = table.filter(pl.col("group").is_in(["attention", "mlp"]))
    assert trace.frozen("e5m2", "core")[1] == core["frozen"].sum() / core["numel"].sum()
    one = table.filter(pl.col("tensor") == "wpe.weight")
    assert trace.frozen("e5m2", "wpe.weight")[1] == one["frozen"].item() / (12 * 24)


def test_your_own_groups(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rule = lambda name, p: "vectors" if p.dim() < 2 else name.split(".")[0]  # noqa: E731
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", groups=rule) as audit:
        train(model, optimizer, 1, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    assert {t["group"] for t in trace.tensors} == {"vectors", "fc1", "fc2", "head"}
    assert trace.numel("vectors") == sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert len(trace.frozen("bf16", "vectors")) == 1


def test_a_choice_of_tensors(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    only = lambda name, p: p.dim() >= 2  # noqa: E731
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", params=only) as audit:
        train(model, optimizer, 1, audit=audit)
    names = [t["name"] for t in hu.Trace.open(tmp_path / "trace").tensors]
    assert names == ["fc1.weight", "fc2.weight", "head.weight"]


def test_a_sample_counts_exactly_the_sampled_tiles(tmp_path: Path) -> None:
    """A quarter of the tiles of every tensor, the same at every step and in every run with the seed."""
    chosen = []
    for seed in (0, 0, 1):
        model = made("gpt")
        model.big = torch.nn.Parameter(torch.randn(50, 770, generator=batches()) * 0.02)
        plain = model.loss
        model.loss = lambda g, plain=plain, model=model: plain(g) + model.big.square().sum()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        path = tmp_path / f"trace{len(chosen)}"
        copies, loss = [], []
        with hu.Audit(
            optimizer, STATIC, expected_never_moved=True, model=model, out=path, sample=0.25, seed=seed
        ) as audit:
            for step in (1, 2):
                optimizer.zero_grad()
                loss.append(model.loss(batches(step)))
                loss[-1].backward()
                audit.log(loss[-1])
                before, lr = weights(model), rates(model, optimizer)
                optimizer.step()
                copies.append((before, weights(model), lr))
        tiles = {w.name: w.tiles.numpy() for w in audit.watched.values()}
        chosen.append(tiles)
        for name, p in model.named_parameters():
            if p.requires_grad:
                everything = kernels.tiles_of(p.numel())
                assert len(set(tiles[name])) == max(1, round(0.25 * everything))
                assert tiles[name].max() < everything
                assert (np.diff(tiles[name]) > 0).all()
        brute = Brute(STATIC, tiles)
        for step, (before, after, lr) in enumerate(copies, start=1):
            brute.step(step, before, after, lr, loss[step - 1].item())
        trace = hu.Trace.open(path)
        brute.assert_equal(trace)
        assert trace.numel("big") == sum(min(768, 38500 - 768 * t) for t in tiles["big"])
    assert all((chosen[0][n] == chosen[1][n]).all() for n in chosen[0])
    assert not np.array_equal(chosen[0]["big"], chosen[2]["big"])
    assert "A fixed sample of 25% of the tiles" in hu.verdict(trace).text(verbose=True)


def test_decay_and_gradient_apart(tmp_path: Path) -> None:
    """Where weight decay is decoupled; null where it is not, or where there is none."""
    model = made("mlp")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    decays = {n: 0.3 if p.dim() >= 2 else 0.0 for n, p in model.named_parameters()}
    brute = Brute(STATIC)
    with hu.Audit(
        optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace", decay=True
    ) as audit:
        for step in (1, 2, 3):
            optimizer.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            audit.log(loss)
            before, lr = weights(model), rates(model, optimizer)
            optimizer.step()
            brute.step(step, before, weights(model), lr, loss.item(), decays)
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    shares = trace.series("frozen_decay", "bf16"), trace.series("frozen_gradient", "bf16")
    assert shares[0].min() > 0.9  # decay alone is lost
    assert shares[1].max() < 0.9


def test_coupled_decay_is_no_part_of_its_own(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", decay=True) as audit:
        train(model, optimizer, 1, audit=audit)
    table = hu.Trace.open(tmp_path / "trace").table().to_polars()
    assert table["frozen_decay"].null_count() == table["frozen_gradient"].null_count() == len(table)


@pytest.mark.parametrize("sample", [None, 0.5])
def test_scores_are_summed_over_their_steps(sample: float | None, tmp_path: Path) -> None:
    """Steps 2 to 4, matrices only; a resumed audit goes on with the sums."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected: dict[str, torch.Tensor] = {}
    copies = []

    def options() -> dict[str, Any]:
        return {"model": model, "out": tmp_path / "trace", "scores": ("e4m3@128", 2, 4), "sample": sample}

    audit = hu.Audit(optimizer, ["bf16"], **options())
    audit.start()
    for step in range(1, 6):
        if step == 4:  # as a second process would
            audit.stop()
            audit = hu.Audit(optimizer, ["bf16"], **options(), resume=True, first_step=4)
            audit.start()
        optimizer.zero_grad()
        model.loss(batches(step)).backward()
        before = weights(model)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        copies.append((step, before, weights(model), gradients))
    audit.stop()
    tiles = {w.name: w.tiles for w in audit.watched.values()}
    for step, before, after, gradients in copies:
        for name in before:
            if before[name].dim() >= 2 and 2 <= step <= 4:
                parts = [before[name], gradients[name], after[name]]
                if sample:
                    parts = [
                        torch.cat([x.reshape(-1)[t * 768 : (t + 1) * 768] for t in tiles[name]])
                        for x in parts
                    ]
                score = kernels.score(*parts, "e4m3@128", after=True)
                expected[name] = expected.get(name, 0) + score
    found = hu.Trace.open(tmp_path / "trace").scores()
    assert found.keys() == expected.keys() == {"fc1.weight", "fc2.weight", "head.weight"}
    for name, score in expected.items():
        np.testing.assert_array_equal(found[name], score.numpy())


def test_following_can_be_left_out(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"never_moved": False, "expected_never_moved": False}
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", **options) as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    with pytest.raises(hu.UsageError, match="without never_moved"):
        trace.never_moved("bf16")
    with pytest.raises(hu.UsageError, match="without expected_never_moved"):
        trace.expected_never_moved("bf16")
    assert "never moved" not in hu.verdict(trace).text(verbose=True)


def test_parts_by_time_cost_a_hundredth_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step with part_seconds=0, unless writing takes long: then the next part waits a hundred times."""
    commit = TraceWriter.commit
    parts = []
    for pause in (0.0, 1.0):
        clock = [100.0]  # ten seconds a step

        def slow(*args: Any, pause: float = pause, clock: list[float] = clock, **options: Any) -> None:
            commit(*args, **options)
            clock[0] += pause

        monkeypatch.setattr(TraceWriter, "commit", slow)
        monkeypatch.setattr(trace_sink.time, "monotonic", lambda clock=clock: clock[0])
        model = made("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        path = tmp_path / f"{pause}"
        with hu.Audit(optimizer, ["bf16"], model=model, out=path, part_seconds=0) as audit:
            for step in range(40):
                clock[0] += 10
                train(model, optimizer, 1, audit=audit, seed=step)
        monkeypatch.undo()
        trace = hu.Trace.open(path)
        assert trace.last_step == 40
        parts.append(len(trace.parts))
    assert parts == [40, 5]  # to steps 1, 11, 21, 31 and the end


def test_listeners_hear_every_audited_step(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    heard: list[dict[str, Any]] = []
    with hu.Audit(
        optimizer, STATIC, model=model, out=tmp_path / "trace", every=2, listeners=[heard.append]
    ) as audit:
        losses = train(model, optimizer, 5, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    assert [h["step"] for h in heard] == [1, 3, 5]
    assert audit.latest == heard[-1]
    for i, h in enumerate(heard):
        assert h["frozen"] == {g: trace.frozen(g)[i] for g in STATIC}
        assert h["never_moved"] == {g: trace.never_moved(g)[i] for g in STATIC}
        assert h["tensors"]["fc1.weight"]["e5m2"] == trace.frozen("e5m2", "fc1.weight")[i]
        assert h["update_ratio"] == pytest.approx(trace.update_ratio()[i], rel=1e-12)  # sums in another order
        assert h["loss"] == losses[2 * i]
        assert h["nonfinite"] == 0


# ---- weights that are stored in low precision ------------------------------------------------------------


def test_a_bfloat16_model_realizes_its_events(tmp_path: Path) -> None:
    """On bf16 the event is what happened: after == before."""
    model = made("mlp").bfloat16()
    generator = batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "trace"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator).bfloat16()).square().mean().backward()
            before = weights(model)
            optimizer.step()
            after = weights(model)
            expected.append({n: int((after[n] == before[n]).sum()) for n in before})
    trace = hu.Trace.open(tmp_path / "trace")
    rows = (
        trace.table()
        .to_polars()
        .filter(pl.col("grid") == "bf16")
        .select("step", "tensor", "frozen")
        .iter_rows()
    )
    assert {(s, t): f for s, t, f in rows} == {
        (s, t): f for s, of in enumerate(expected, start=1) for t, f in of.items()
    }
    assert 0 < sum(expected[-1].values()) < sum(p.numel() for p in model.parameters())
    assert {t["dtype"] for t in trace.tensors} == {"bfloat16"}
    found = {f.grid: f for f in findings(trace)}
    assert found["bf16"].measured
    assert not found["e5m2"].measured
    said = hu.verdict(trace).text(verbose=True)
    assert "the optimizer sees bfloat16" in said
    assert "of updates lost (" in said
    assert "of updates would be lost (" in said


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
@pytest.mark.parametrize("policy", ["rne", "sr"])
def test_a_write_back_realizes_its_events(policy: str, storage: str, tmp_path: Path) -> None:
    """The audit of its own grid says what the write-back says, wherever the weights are kept."""
    model = made("mlp")
    dtype = torch.bfloat16 if storage == "native" else torch.float32
    model = model.to(dtype)
    generator = batches()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    opt = hu.WriteBack(inner, "e4m3@128", policy, model=model, seed=1, storage=storage)
    expected = {}
    with hu.Audit(opt, ["e4m3@128"], model=model, out=tmp_path / "trace"):
        for step in range(1, 6):
            opt.zero_grad()
            model(torch.randn(8, 16, generator=generator).to(dtype)).square().mean().backward()
            opt.step()
            for row in opt.events.rows:
                expected[step, row.name] = (row.frozen, row.never_moved)
    trace = hu.Trace.open(tmp_path / "trace")
    on_grid = (
        trace.table().to_polars().filter(pl.col("tensor").is_in(["fc1.weight", "fc2.weight", "head.weight"]))
    )
    found = {(r["step"], r["tensor"]): (r["frozen"], r["never_moved"]) for r in on_grid.iter_rows(named=True)}
    assert found == expected
    assert 0 < sum(f for f, _ in found.values()) < sum(on_grid["numel"])
    stored = {t["name"]: t["stored"] for t in trace.tensors}
    assert stored["fc1.weight"] == "e4m3@128"
    assert stored["norm.weight"] == str(dtype).removeprefix("torch.")
    assert trace.manifest["optimizers"][0]["class"] == "WriteBack"
    assert trace.manifest["optimizers"][0]["wraps"] == "AdamW"
    (finding,) = findings(trace)
    assert finding.of == trace.numel("all-2d") / trace.numel()
    assert finding.measured
    said = hu.verdict(trace).text(verbose=True)
    assert "6 tensor(s) with 7.8% of the weights are not stored on it" in said
    assert ("e4m3@128, sr write-back: " if policy == "sr" else "% of updates lost (") in said


def test_a_found_write_back_is_one_step(tmp_path: Path) -> None:
    """Without being told of it, the audit sees the outer optimizer, not the one inside."""
    model = made("mlp")
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-2), "e4m3@128", "rne", model=model)
    frozen = []
    with hu.Audit(None, ["e4m3@128"], model=model, out=tmp_path / "trace", params=lambda n, p: p.dim() >= 2):
        for step in range(4):
            opt.zero_grad()
            model.loss(batches(step)).backward()
            opt.step()
            frozen.append(opt.events.frozen)
    np.testing.assert_array_equal(hu.Trace.open(tmp_path / "trace").frozen("e4m3@128"), frozen)


def test_memory_that_runs_out_while_a_part_is_written_disables_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.Audit(optimizer, "bf16", model=model, out=tmp_path / "t", part_steps=1) as audit:
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            monkeypatch.setattr(files, "hook", out_of_memory)
        monkeypatch.undo()
    assert audit.trouble is not None
    assert "could not be written at step 1: memory ran out" in audit.trouble
    assert capsys.readouterr().err.count("memory ran out") == 1
