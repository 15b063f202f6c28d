"""Bad input: a HalfulpError that names what is wrong, and nothing changed."""

from __future__ import annotations

import copy
import errno
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same
from safetensors.torch import save_file
from writeback_models import Tied, adamw, masks, train, unsealed, values, written_back

import halfulp as hu
from halfulp.errors import VersionError
from halfulp.writeback import Kahan, WriteBackOptions, load, save
from halfulp.writeback.policies import Step
from halfulp.writeback.telemetry import StepEvents

GRID = "e4m3@16"


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """Small tensors: two threads would only wait for each other."""
    torch.set_num_threads(1)


def everything(model: torch.nn.Module, opt: hu.WriteBack) -> dict[str, Any]:
    """All that a failed call must leave alone."""
    state = opt.state_dict()
    flat = {f"{k}.{n}": v for k, entry in state["state"].items() for n, v in entry.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]
    return copy.deepcopy({"steps": opt.steps, "groups": groups, **flat, **model.state_dict()})


def assert_unchanged(before: dict[str, Any], model: torch.nn.Module, opt: hu.WriteBack) -> None:
    after = everything(model, opt)
    assert set(after) == set(before)
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert_same(after[key], value, key)
        else:
            assert after[key] == value, key


# ---- making one -----------------------------------------------------------------------------------


def with_parameter(p: torch.nn.Parameter) -> torch.nn.Module:
    model = torch.nn.Module()
    model.odd = p
    return model


MAKING: dict[str, tuple[Callable[[], Any], str]] = {
    "a WriteBack around a WriteBack": (
        lambda: hu.WriteBack(written_back(m := Tied()), GRID, model=m),
        "a WriteBack already",
    ),
    "no optimizer": (lambda: hu.WriteBack(Tied(), GRID), "wraps a torch optimizer, not Tied"),
    "the class of an optimizer": (
        lambda: hu.WriteBack(torch.optim.SGD, GRID),  # type: ignore[arg-type]
        "wraps a torch optimizer, not type. Make one first",
    ),
    "a module for its parameters": (
        lambda: hu.AdamW(Tied(), lr=1e-3),
        r"takes parameters, not the module \(Tied\): AdamW\(model.named_par",
    ),
    "the dots of a printed fix": (
        lambda: hu.SGD(Tied().parameters(), lr=...),
        "lr must be a number, such as 1e-5, not Ellipsis",  # type: ignore[arg-type]
    ),
    "text for a rate": (
        lambda: hu.Lion(Tied().parameters(), lr="1e-5"),
        "lr must be a number, such as 1e-5, not '1e-5'",  # type: ignore[arg-type]
    ),
    "no number for a decay": (
        lambda: hu.AdamW(Tied().parameters(), weight_decay="0.1"),  # type: ignore[arg-type]
        "AdamW: weight_decay must be a number, such as 1e-5, not '0.1'",
    ),
    "one beta": (
        lambda: hu.Lion(Tied().parameters(), betas=0.9),  # type: ignore[arg-type]
        r"Lion: betas must be a pair of numbers, such as \(0.9, 0.999\), not 0.9",
    ),
    "nothing for parameters": (lambda: hu.AdamW(None), r"takes parameters, not NoneType: AdamW\(model"),
    "parameters that are used up": (lambda: hu.AdamW(iter(())), "no parameters: an empty list, or a gen"),
    "a group without parameters": (
        lambda: hu.WriteBack(torch.optim.SGD([{"params": []}]), GRID),
        "the optimizer has no parameters",
    ),
    "no model for native weights": (
        lambda: hu.native(None),  # type: ignore[arg-type]
        r"native takes a torch\.nn\.Module, not NoneType",
    ),
    "an unknown grid": (lambda: written_back(Tied(), "e9m9"), "unknown grid 'e9m9'"),
    "an unknown policy": (lambda: written_back(Tied(), GRID, "magic"), "unknown policy 'magic'"),
    "an unknown projection": (lambda: written_back(Tied(), project="up"), "project must be one of.*'up'"),
    "an unknown storage": (lambda: written_back(Tied(), storage="disk"), "storage must be one of.*'disk'"),
    "an unknown rule for the non-finite": (
        lambda: written_back(Tied(), options=WriteBackOptions(nonfinite="ignore")),
        "nonfinite must be one of.*'ignore'",
    ),
    "packed without a model": (
        lambda: hu.WriteBack(adamw(Tied()), GRID, "rne", storage="packed"),
        "storage='packed'.*model=",
    ),
    "integers": (  # which cannot be trained
        lambda: written_back(
            with_parameter(torch.nn.Parameter(torch.ones(4, 4, dtype=torch.int32), requires_grad=False)),
            params=["odd"],
        ),
        "no parameter to write back",
    ),
    "complex numbers": (
        lambda: written_back(with_parameter(torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))),
        "parameter 'odd': complex64 cannot hold grid values",
    ),
    "float8 parameters": (
        lambda: written_back(
            with_parameter(torch.nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))), params=["odd"]
        ),
        "parameter 'odd': float8_e4m3fn cannot hold grid values",
    ),
    "weights that are not finite": (
        lambda: written_back(with_parameter(torch.nn.Parameter(torch.full((2, 2), torch.inf)))),
        r"parameter 'odd' has 4 value\(s\) that are not finite",
    ),
    "weights off the grid with project='none'": (
        lambda: written_back(with_parameter(torch.nn.Parameter(torch.tensor([[1.0, 1.01]]))), project="none"),
        "parameter 'odd' is not on grid e4m3@16: 1 of 2 values",
    ),
    "dqt on another grid": (lambda: written_back(Tied(), GRID, "dqt"), f"int3/dqt, not {GRID}"),
    "a mask of another model": (
        lambda: written_back(Tied(), GRID, hu.TileMaster({"wte": torch.ones(3).bool()})),
        "no entry for 'embedding.weight'.*It knows wte",
    ),
    "an empty mask": (lambda: written_back(Tied(), GRID, hu.TileMaster({})), "no entry.*It knows nothing"),
    "a mask of another size": (
        lambda: written_back(
            Tied(), GRID, hu.TileMaster(masks(Tied()) | {"up.weight": torch.ones(9).bool()})
        ),
        "the mask of 'up.weight' must be 2 booleans.*but it is 9",
    ),
    "a mask of numbers": (
        lambda: written_back(Tied(), GRID, hu.TileMaster(masks(Tied()) | {"up.weight": torch.ones(2)})),
        "the mask of 'up.weight' must be 2 booleans.*torch.float32",
    ),
}


@pytest.mark.parametrize("kind", MAKING)
def test_making_one(kind: str) -> None:
    make, match = MAKING[kind]
    with pytest.raises(hu.UsageError, match=match):
        make()


def test_a_failure_leaves_the_model_and_the_optimizer_alone() -> None:
    """The last tensor is bad: the first has not been projected, and the optimizer still works by itself."""
    model = Tied()
    with torch.no_grad():
        model.down.weight[0, 0] = torch.nan
    before, base = values(model), adamw(model)
    for storage in ("container", "packed"):
        with pytest.raises(hu.UsageError, match=r"'down.weight'"):
            hu.WriteBack(base, GRID, "sr", model=model, storage=storage)
    assert all(torch.equal(p, before[n]) or n == "down.weight" for n, p in model.named_parameters())
    with torch.no_grad():
        model.down.weight[0, 0] = 0.0
    train(model, base, 1)


def test_weights_on_the_grid_need_no_projection() -> None:
    model = Tied()
    written_back(model)
    before = values(model)
    written_back(model, project="none")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("call", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copying_one(call: Callable[[Any], Any]) -> None:
    """torch would copy moments and groups only, and the copy would write nothing back."""
    with pytest.raises(hu.UsageError, match="not copied or pickled"):
        call(written_back(Tied()))


@pytest.mark.parametrize("storage", ["container", "packed"])
def test_a_policy_that_fails(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are called when every policy has been: weights that were to be written are as they were."""
    model = Tied()
    options = WriteBackOptions(materialise="all", one_pass=False)
    opt = written_back(model, GRID, "master", storage=storage, options=options)
    train(model, opt, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    write = Step.write

    def fail(step: Step, *args: Any, **options: Any) -> Any:
        if step.name == opt.slots[-1].name:
            raise RuntimeError("injected")
        return write(step, *args, **options)

    monkeypatch.setattr(Step, "write", fail)
    with pytest.raises(RuntimeError, match="injected"):
        train(model, opt, 1)
    monkeypatch.undo()
    after = model.state_dict()
    assert all(torch.equal(after[s.name], before[s.name]) for s in opt.slots)
    assert opt.steps == 2
    train(model, opt, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["sr", "kahan"])
def test_an_interrupt_after_all_tensors_are_written(
    policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the one call that writes them: what is left to do is done, and nothing twice."""
    runs = []
    for interrupts in (False, True):
        model = Tied().to(dtype)
        opt = written_back(model, GRID, policy, options=WriteBackOptions(one_pass=False))
        train(model, opt, 2)
        noting = StepEvents.__init__
        calls: list[int] = []

        def interrupted(
            events: StepEvents, noting: Any = noting, calls: list[int] = calls, **given: Any
        ) -> None:
            noting(events, **given)
            calls.append(events.step)
            if len(calls) == 1:
                raise KeyboardInterrupt

        if interrupts:
            monkeypatch.setattr(StepEvents, "__init__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(model, opt, 1, start=2)
            monkeypatch.undo()
            assert calls == [3, 3]
            assert opt.steps == 2
            opt.steps = 3  # the weights have moved
        else:
            train(model, opt, 1, start=2)
        opt.zero_grad()
        train(model, opt, 2, start=3)
        runs.append((model.state_dict(), opt.events))
    assert runs[0][1] == runs[1][1]
    for name, value in runs[0][0].items():
        assert_same(runs[1][0][name], value, name)


def test_an_interrupt_between_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while tensors are written: the others are written too, so that all weights are on the grid."""
    model = Tied()
    opt = written_back(model, GRID, "master", options=WriteBackOptions(one_pass=False))
    train(model, opt, 2)
    finish, calls = Step.finish, []

    def interrupted(step: Step) -> None:
        finish(step)
        calls.append(step.name)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Step, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, opt, 1)
    monkeypatch.undo()
    for slot in opt.slots:
        assert_same(slot.p.detach(), hu.grid(GRID).round(slot.p.detach()))
    train(model, opt, 1)


# ---- gradients that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("storage", ["container", "packed"])
def test_raise(bad: float, storage: str) -> None:
    """Before anything changes: weights, moments, carries, telemetry and the step number."""
    model = Tied()
    opt = written_back(model, GRID, "kahan", options=WriteBackOptions(nonfinite="raise"), storage=storage)
    train(model, opt, 2)
    model.up.weight.grad[3, 5] = bad
    before = everything(model, opt)
    with pytest.raises(
        hu.UsageError, match=r"gradient of 'up.weight' is not finite at step 3.*nothing was changed"
    ):
        opt.step()
    assert_unchanged(before, model, opt)
    train(model, opt, 1)
    assert opt.steps == 3


@pytest.mark.parametrize("one_pass", [True, False])
def test_spoilt_moments_are_told_of_once(one_pass: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The weights stay finite and so does the loss: only the log can say that nothing moves any more."""
    model = Tied()
    opt = written_back(model, "bf16", "sr", options=WriteBackOptions(one_pass=one_pass))
    train(model, opt, 2)
    model.up.weight.grad[3, 5] = torch.nan
    opt.step()
    with caplog.at_level("WARNING", "halfulp"):
        train(model, opt, 70)
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert told == [told[0]]
    assert "at step 33 the update of 'up.weight' is not finite" in told[0]
    assert "go back to a checkpoint" in told[0]


@pytest.mark.parametrize("storage", ["container", "packed"])
@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr", "eco", "kahan", "master"])
def test_count(policy: str, storage: str) -> None:
    """Counted, and those weights stay as they are; carries and masters stay finite; the others move on."""
    model = Tied()
    opt = written_back(model, GRID, policy, storage=storage)
    train(model, opt, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    bad = torch.zeros(40, 24, dtype=torch.bool)
    bad[3, 5:7] = bad[0, 0] = True
    model.up.weight.grad[bad] = torch.nan
    opt.step()
    after = model.state_dict()
    assert torch.equal(after["up.weight"][bad], before["up.weight"][bad])
    assert opt.events["up.weight"].nonfinite == opt.events.nonfinite == 3
    assert bool((after["up.weight"] != before["up.weight"]).any())
    assert all(torch.isfinite(v).all() for v in after.values())
    for key, value in opt.slots[1].state.items():
        assert torch.isfinite(value).all(), key


def test_raise_with_sparse_gradients() -> None:
    model = torch.nn.Embedding(5, 4, sparse=True)
    opt = hu.WriteBack(
        torch.optim.SparseAdam(model.parameters()),
        GRID,
        "sr",
        model=model,
        options=WriteBackOptions(nonfinite="raise"),
    )
    model(torch.tensor([1, 2])).sum().backward()
    opt.step()
    (model(torch.tensor([1, 2])).sum() * torch.inf).backward()
    with pytest.raises(hu.UsageError, match="gradient of 'weight' is not finite"):
        opt.step()


# ---- states ---------------------------------------------------------------------------------------


def other_line(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """A state with something changed in what it says of itself."""

    def edit(state: dict[str, Any]) -> None:
        line = json.loads(state["param_groups"][0]["halfulp"])
        change(line)
        state["param_groups"][0]["halfulp"] = json.dumps(line)

    return edit


def entry(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        state["state"][0]["halfulp." + name] = change(state["state"][0]["halfulp." + name])

    return edit


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[hu.HalfulpError], str]] = {
    "another version": (
        other_line(lambda s: s.update(version=99)),
        VersionError,
        "version 99.*reads version 1 and 2",
    ),
    "another seed": (other_line(lambda s: s.update(seed=8)), hu.UsageError, "seed 8, this WriteBack 0"),
    "another storage": (
        other_line(lambda s: s.update(storage="packed")),
        hu.UsageError,
        "storage 'packed'.*'container'",
    ),
    "another grid": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(1, "bf16")),
        hu.UsageError,
        "'embedding.weight'.*grid 'bf16', this WriteBack 'e4m3@16'. Make the WriteBack with the grid",
    ),
    "another policy": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(2, "rne")),
        hu.UsageError,
        r"'embedding.weight'.*policy 'rne', this WriteBack 'kahan\(dtype=float32\)'",
    ),
    "another name": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(0, "wte")),
        hu.UsageError,
        "parameter 0.*name 'wte', this WriteBack 'embedding.weight'. The state is of another model, or",
    ),
    "another shape": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(3, [2, 2])),
        hu.UsageError,
        r"'embedding.weight'.*shape \[2, 2\]",
    ),
    "a parameter too few": (
        other_line(lambda s: s["parameters"].pop("0")),
        hu.UsageError,
        "parameter 0 is managed only in this WriteBack",
    ),
    "a parameter too many": (
        other_line(lambda s: s["parameters"].update({"6": ["x", "bf16", "rne", [2]]})),
        hu.UsageError,
        "parameter 6 is managed only in the state",
    ),
    "no step": (
        other_line(lambda s: s.pop("step")),
        hu.CorruptionError,
        "part of this optimizer state is not whole: it has no step",
    ),
    "parameters of another form": (
        other_line(lambda s: s.update(parameters={"0": ["x"]})),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "parameters that are a list": (
        other_line(lambda s: s.update(parameters=[1])),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "a line that is no JSON": (
        lambda s: s["param_groups"][0].update(halfulp="{]"),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "a line that is a list": (
        lambda s: s["param_groups"][0].update(halfulp="[]"),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "a state without its line": (
        lambda s: s["param_groups"][0].pop("halfulp"),
        hu.CorruptionError,
        "not the line that says what they belong to",
    ),
    "a missing carry": (
        lambda s: s["state"][0].pop("halfulp.carry"),
        hu.CorruptionError,
        "'embedding.weight': the state keeps.*'moved'",
    ),
    "a missing entry": (
        lambda s: s["state"].pop(0),
        hu.CorruptionError,
        r"'embedding.weight': the state keeps \[\]",
    ),
    "something more": (
        lambda s: s["state"][0].update({"halfulp.extra": torch.ones(1)}),
        hu.CorruptionError,
        "'extra'",
    ),
    "a carry of another type": (
        entry("carry", torch.Tensor.double),
        hu.CorruptionError,
        "carry.*torch.float64",
    ),
    "a carry of another shape": (
        entry("carry", lambda t: t[:3]),
        hu.CorruptionError,
        r"saved carry is \(3, 24\)",
    ),
    "a carry that is a number": (entry("carry", lambda t: 3.0), hu.CorruptionError, "saved carry is a float"),
    "no groups": (lambda s: s.update(param_groups=[]), hu.CorruptionError, "not an optimizer state"),
    "groups that are a number": (
        lambda s: s.update(param_groups=3),
        hu.CorruptionError,
        "not an optimizer state",
    ),
    "a group without parameters": (
        lambda s: s["param_groups"][0].pop("params"),
        hu.CorruptionError,
        "not an optimizer state",
    ),
    "a checkpoint around it": (
        lambda s: s.update(model={}, optimizer=dict(s), state=0, param_groups=0),
        hu.CorruptionError,
        "inside this checkpoint: load its 'optimizer'",
    ),
    "no state": (lambda s: s.pop("state"), hu.CorruptionError, "not an optimizer state"),
    "a state that is a list": (lambda s: s.update(state=[1]), hu.CorruptionError, "not an optimizer state"),
    "another number of groups": (
        lambda s: s["param_groups"].append({"params": []}),
        hu.UsageError,
        "the wrapped AdamW does not take this state",
    ),
}


@pytest.mark.parametrize("kind", STATES)
def test_states(kind: str) -> None:
    """Each is refused with its own words before anything is taken up."""
    model = Tied()
    opt = written_back(model, GRID, "kahan")
    train(model, opt, 2)
    change, error, match = STATES[kind]
    state, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    train(model, opt, 1, start=2)
    model.load_state_dict(weights)  # those that belong to the state
    before = everything(model, opt)
    change(state)
    with pytest.raises(error, match=match):
        opt.load_state_dict(state)
    assert_unchanged(before, model, opt)


@pytest.mark.parametrize(
    "garbage", [None, 3, "state", [], {}, {"state": {}}, {"param_groups": [{}], "state": {}}]
)
def test_garbage(garbage: Any) -> None:
    opt = written_back(Tied())
    with pytest.raises(hu.CorruptionError, match="not an optimizer state"):
        opt.load_state_dict(garbage)


def test_weights_off_the_grid_when_a_state_is_loaded() -> None:
    """The state goes with its weights: with others, even a bit away, it would be another run."""
    model = Tied()
    opt = written_back(model)
    train(model, opt, 2)
    state = copy.deepcopy(opt.state_dict())
    with torch.no_grad():
        model.up.weight[:2] += 1e-4
    with pytest.raises(
        hu.UsageError, match=r"'up.weight' is not on grid e4m3@16: \d+ of 960.*Load the model's weights"
    ):
        opt.load_state_dict(state)


def test_a_mask_with_other_tiles() -> None:
    """As many masters, of other weights."""
    a, b = ({"weight": torch.tensor(m)} for m in ([True, False, True], [True, True, False]))
    model = torch.nn.Linear(768, 3, bias=False)
    state = hu.WriteBack(adamw(model), GRID, hu.TileMaster(a), model=model).state_dict()
    opt = hu.WriteBack(adamw(model), GRID, hu.TileMaster(b), model=model)
    with pytest.raises(hu.UsageError, match=r"'weight': the state has other tiles than this policy chooses"):
        opt.load_state_dict(state)


def test_packed_codes_that_are_none() -> None:
    """float8_e4m3fn has no infinity: 0x7f is no code of it."""
    model = Tied()
    opt = written_back(model, storage="packed")
    state = unsealed(opt.state_dict())
    state["state"][1]["halfulp.codes"][7] = 0x7F
    before = everything(model, opt)
    with pytest.raises(hu.CorruptionError, match=r"'up.weight': not codes of grid"):
        opt.load_state_dict(state)
    assert_unchanged(before, model, opt)


# ---- files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[hu.WriteBack, torch.nn.Module, Path]:
    model = Tied()
    opt = written_back(model, GRID, "kahan")
    train(model, opt, 2)
    save(opt, tmp_path / "state.safetensors")
    return opt, model, tmp_path / "state.safetensors"


Saved = tuple[hu.WriteBack, torch.nn.Module, Path]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_a_truncated_file(saved: Saved, share: float) -> None:
    opt, model, path = saved
    before, content = everything(model, opt), path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(hu.CorruptionError, match=str(path)):
        load(opt, path)
    assert_unchanged(before, model, opt)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"halfulp": "null"},
        {"halfulp": "{"},
        {"halfulp": "[]"},
        {"halfulp": "{}"},
        {"halfulp": '{"state": 1}'},
    ],
)
def test_another_safetensors_file(saved: Saved, metadata: dict[str, str] | None) -> None:
    opt, model, path = saved
    before = everything(model, opt)
    save_file({"0/x": torch.ones(3)}, path, metadata=metadata)
    with pytest.raises(hu.CorruptionError, match=f"{path} is.*not a state that halfulp.writeback.save wrote"):
        load(opt, path)
    assert_unchanged(before, model, opt)


def test_a_file_that_is_not_there(saved: Saved) -> None:
    opt, _, path = saved
    with pytest.raises(hu.CorruptionError, match=r"nothing.safetensors"):
        load(opt, path.with_name("nothing.safetensors"))


def test_a_failed_save_leaves_the_old_file(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written aside and renamed: a crash in between costs the new state, not the old one."""
    opt, model, path = saved
    content, weights = path.read_bytes(), copy.deepcopy(model.state_dict())
    train(model, opt, 1, start=2)

    def crash(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(hu.HalfulpError, match="the disk is full") as caught:
            save(opt, path)
    assert caught.value.exit_code == 4
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]
    model.load_state_dict(weights)
    load(written_back(model, GRID, "kahan"), path)


def test_a_state_that_json_cannot_hold(tmp_path: Path) -> None:
    """LBFGS keeps lists of tensors; torch.save takes them."""
    model = Tied()
    opt = hu.WriteBack(torch.optim.LBFGS(model.parameters(), max_iter=4), GRID, "rne", model=model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(torch.zeros(1, 3, dtype=torch.long)).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    with pytest.raises(hu.UsageError, match="JSON cannot hold"):
        save(opt, tmp_path / "state.safetensors")
    assert list(tmp_path.iterdir()) == []
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    opt.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_every_error_is_a_halfulp_error() -> None:
    """One root, and UsageError is a ValueError, too."""
    assert issubclass(hu.UsageError, hu.HalfulpError)
    assert issubclass(hu.UsageError, ValueError)
    assert issubclass(hu.CorruptionError, hu.HalfulpError)
    assert issubclass(VersionError, hu.HalfulpError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[({"seed": seed}, r"seed=\.\.\.\) takes an int") for seed in (1.5, "3", True, None, float("nan"))],
        *[({"policy": p}, "a policy is a name such as 'kahan'") for p in (None, 5, Kahan)],
        *[({"params": chosen}, "params= takes a list of names") for chosen in (5, "weight")],
        ({"params": [torch.ones(2)]}, "params= takes the names of parameters, .* not Tensor"),
        ({"params": iter(())}, "no parameter to write back: params= is an empty list, or a generator"),
        ({"params": len}, "takes a function of name and parameter.*too many"),
        *[({"model": model}, r"model= takes a torch\.nn\.Module") for model in (5, "m")],
    ],
)  # fmt: skip
def test_arguments_of_another_kind(options: dict[str, Any], said: str) -> None:
    model = torch.nn.Linear(4, 4)
    settings: dict[str, Any] = {"grid": GRID, "policy": "rne", **options}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hu.UsageError, match=said):
        hu.WriteBack(adamw(model), **settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_how_stand_ins_are_made_is_checked() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(hu.UsageError, match="materialise must be one of tensor, all, not 'some'"):
        hu.WriteBack(adamw(model), GRID, "rne", model=model, options=WriteBackOptions(materialise="some"))
