"""A run that stops, is saved, and goes on in another process is the run that did not stop, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from writeback_resume import CASES, FORMATS, STEPS, STOPS, Run

import halfulp as hu
from halfulp.errors import TamperingError


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Digests of every step of every case: without a stop, and after each checkpoint in a new process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = {}
    for case in CASES:
        run = Run(case)
        whole[case] = []
        for number in range(STEPS):
            if number in STOPS:
                for kind in FORMATS:
                    run.save(folder / case / str(number) / kind, kind)
            whole[case].append(run.step(number))
    torch.set_num_threads(threads)
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(Path(hu.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-W", "error", str(here / "writeback_resume.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return whole, json.loads((folder / "log.json").read_text())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_going_on(logs: tuple[dict[str, list[str]], dict[str, list[str]]], case: str, kind: str) -> None:
    """Weights, moments, what the policy keeps, events, stream, rate, scale and loss of every later step."""
    whole, resumed = logs
    for stop in STOPS:
        assert resumed[f"{case}/{stop}/{kind}"] == whole[case][stop:], f"stopped before step {stop}"


def test_digests_differ(logs: tuple[dict[str, list[str]], dict[str, list[str]]]) -> None:
    """No two steps and no two policies have the same digest, or the comparison above would say nothing."""
    every = [d for log in logs[0].values() for d in log]
    assert len(set(every)) == len(every) == len(CASES) * STEPS


@pytest.mark.parametrize("case", ["kahan, container", "master, packed"])
def test_a_loaded_state_is_not_written_to(case: str) -> None:
    """Everything is copied, moments too, so that one state can be taken up twice."""
    run = Run(case)
    run.step(0)
    loaded = copy.deepcopy(run.opt.state_dict())
    before = copy.deepcopy(loaded)
    run.opt.load_state_dict(loaded)
    run.step(1)
    for k, entry in before["state"].items():
        for name in entry:
            assert torch.equal(loaded["state"][k][name], entry[name]), name
    assert loaded["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("kind", ["WriteBack", "AdamW", "SGD", "Lion"])
def test_a_state_in_memory_is_loaded_again_and_again(kind: str) -> None:
    """Trained from and loaded again, as for a search over rates, it is the same start; a rate that is a
    tensor is copied as well."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    made = (
        hu.WriteBack(torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.01)), "e4m3@16", "kahan")
        if kind == "WriteBack"
        else getattr(hu, kind)(model.named_parameters(), lr=0.01, grid="e4m3@16", policy="kahan")
    )

    def step(number: int) -> torch.Tensor:
        made.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        made.step()
        return model.weight.detach().clone()

    step(0)
    state, weights = copy.deepcopy((made.state_dict(), model.state_dict()))
    ends = []
    for _ in range(3):
        model.load_state_dict(weights)
        made.load_state_dict(state)
        step(1)
        ends.append(step(2))
        if kind == "WriteBack":
            made.param_groups[0]["lr"].mul_(0.5)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_a_state_that_lives_on_says_what_it_is() -> None:
    """``state_dict()`` has the optimizer's own tensors, as torch's has: to keep one, copy it."""
    run = Run("kahan, container")
    run.step(0)
    kept = run.opt.state_dict()
    run.step(1)
    with pytest.raises(TamperingError, match=r"keep copy\.deepcopy\(opt\.state_dict\(\)\)"):
        run.opt.load_state_dict(kept)


def test_loading_goes_back_in_time() -> None:
    """In one process: a state taken up again gives the same steps again."""
    run = Run("sr, packed")
    run.step(0)
    model, opt = copy.deepcopy((run.model.state_dict(), run.opt.state_dict()))
    rest = run.schedule.state_dict(), run.scaler.state_dict()
    first = [run.step(n) for n in (1, 2)]
    run.opt.load_state_dict(opt)
    run.model.load_state_dict(model)
    run.schedule.load_state_dict(rest[0])
    run.scaler.load_state_dict(rest[1])
    assert [run.step(n) for n in (1, 2)] == first


@pytest.mark.parametrize("one_pass", [False, True])
def test_hooks_of_states(one_pass: bool) -> None:
    """Those that torch's optimizers call, in their order; what one gives is taken."""
    model = torch.nn.Linear(4, 4)
    made = hu.AdamW if one_pass else torch.optim.AdamW
    optimizer = made(model.named_parameters(), lr=1e-3)
    wb = (
        optimizer
        if isinstance(optimizer, hu.WriteBack)
        else hu.WriteBack(optimizer, "bf16", "sr", model=model)
    )
    called: list[str] = []

    def given(state: dict[str, object]) -> dict[str, object]:
        called.append("of a state")
        return {**state, "more": 1}

    def taken(state: dict[str, object]) -> dict[str, object]:
        called.append("before loading")
        return {k: v for k, v in state.items() if k != "more"}

    wb.register_state_dict_pre_hook(lambda _: called.append("before"))
    wb.register_state_dict_post_hook(lambda _, state: given(state))
    wb.register_load_state_dict_pre_hook(lambda _, state: taken(state))
    wb.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    saved = wb.state_dict()
    assert saved["more"] == 1
    wb.load_state_dict(saved)
    assert saved["more"] == 1
    assert called == ["before", "of a state", "before loading", "loaded"]


def test_looking_at_the_state_before_the_first_step_changes_nothing() -> None:
    """``opt.state[p]`` makes an empty entry, as torch's does; it was a KeyError when the state was saved."""
    states = []
    for looked in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).bfloat16()
        for opt in (hu.WriteBack(torch.optim.AdamW(model.parameters()), "bf16", "sr", model=model),
                    hu.AdamW(model.parameters(), lr=1e-3)):  # fmt: skip
            assert not looked or opt.state[model.weight] == {}
            states.append([opt.state_dict()])
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            opt.step()
            states[-1].append(opt.state_dict())
    half = len(states) // 2
    for plain, seen in zip(states[:half], states[half:], strict=True):
        for a, b in zip(plain, seen, strict=True):
            assert str(a) == str(b)


def test_a_trainable_scalar_under_kahan_goes_on() -> None:
    """A parameter without dimensions, such as CLIP's logit_scale: its carry is checked like any other."""

    def made() -> tuple[torch.nn.Parameter, hu.AdamW]:
        scale = torch.nn.Parameter(torch.tensor(1.3, dtype=torch.bfloat16))
        return scale, hu.AdamW([scale], lr=1e-3, policy="kahan")

    def step(scale: torch.nn.Parameter, opt: hu.AdamW) -> None:
        scale.grad = torch.ones_like(scale)
        opt.step()

    (scale, opt), (again, resumed) = made(), made()
    step(scale, opt)
    again.data.copy_(scale.data)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    step(scale, opt)
    step(again, resumed)
    assert torch.equal(again, scale)
    assert torch.equal(resumed.slots[0].state["carry"], opt.slots[0].state["carry"])
