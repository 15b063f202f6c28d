"""The model as if it held rehearsed weights: everything is put back, and the run knows nothing of it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rehearsal_runs import Net, begun, loss_of, steps_of, train
from safetensors.torch import load_file

import halfulp as hu
from halfulp.errors import UsageError


def test_the_run_is_bitwise_the_same(tmp_path: Path) -> None:
    """With rehearsals and evaluations that draw random numbers and pass through batch norm."""

    def run(rehearse: Any) -> tuple[list[torch.Tensor], Any]:
        net, opt = begun()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn: list[Any] = []
        seen: list[float] = []

        def evaluate() -> torch.Tensor:
            drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
            return loss_of(net, 1000)

        audit = hu.Audit(opt, "bf16", model=net, rehearse=rehearse)
        with audit:
            for step in range(6):
                train(net, opt, range(step, step + 1))
                if step % 2:
                    if rehearse is None:
                        seen.append(float(evaluate().detach()))
                    else:
                        made = audit.evaluate(evaluate)
                        seen.append(made.real)
                        assert len(set(drawn[-1 - 3 * len(audit.rehearsals) + 1 :])) == 1
        tensors = [*net.state_dict().values(), *(t for s in opt.state.values() for t in s.values())]
        return tensors, (seen, float(torch.rand(())), random.random(), float(np.random.rand()))  # noqa: NPY002

    plain, tail = run(None)
    rehearsed, same = run(["e5m2", "bf16:kahan", "e4m3@128:sr"])
    assert tail == same
    assert all(torch.equal(a, b) for a, b in zip(plain, rehearsed, strict=True))


def test_as_if_puts_everything_back() -> None:
    net, opt = begun()
    with hu.Audit(opt, "e5m2", model=net, rehearse=["e5m2", "bf16"]) as audit:
        train(net, opt, range(3))
        before = copy.deepcopy(net.state_dict())
        places = [p.data_ptr() for p in net.parameters()]
        graph = loss_of(net.eval(), 7)

        def meddle() -> None:
            assert not torch.equal(net.inner.weight, before["inner.weight"])
            assert net.again.weight is net.inner.weight
            net.train()
            loss_of(net, 1)
            net.outer.weight.data = torch.zeros(1)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), audit.as_if("e5m2"):
            meddle()
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert places == [p.data_ptr() for p in net.parameters()]
        graph.backward()  # it is still what it was
        with audit.as_if("bf16"):
            with pytest.raises(UsageError, match="leave that one first"), audit.as_if("e5m2"):
                pass
            with pytest.raises(UsageError, match=r"AdamW\.step\(\) was called inside as_if\('bf16'"):
                opt.step()
            torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0).step()  # another model's
        with audit.as_if("bf16", "lower"):
            assert torch.equal(net.inner.weight, hu.grid("bf16").round(before["inner.weight"]))
            assert torch.equal(net.inner.bias, before["inner.bias"])
        train(net, opt, range(3, 4))
        assert steps_of(audit) == 4
    with audit.as_if("e5m2"):  # the codes are there when the audit is over
        pass


def test_a_compiled_model_sees_the_rehearsed_weights() -> None:
    net, opt = begun()
    compiled = torch.compile(net.eval(), backend="aot_eager")
    with hu.Audit(opt, "e5m2", model=compiled, rehearse="e5m2") as audit:
        train(net, opt, range(2))
        with audit.as_if("e5m2"):
            assert torch.equal(loss_of(compiled, 9), loss_of(net, 9))
            inside = loss_of(compiled, 9)
        assert torch.equal(loss_of(compiled, 9), loss_of(net, 9))
        assert not torch.equal(loss_of(compiled, 9), inside)


def test_saved_weights_load_into_the_model(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(opt, "e5m2", model=torch.compile(net, backend="eager"), rehearse="e5m2") as audit:
        train(net, opt, range(3))
        audit.save_as_if("e5m2", tmp_path / "w.safetensors", "upper")
        with audit.as_if("e5m2", "upper"):
            expected = copy.deepcopy(net.state_dict())
    other = Net()
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert all(torch.equal(v, expected[k]) for k, v in other.state_dict().items())
    assert not torch.equal(other.inner.weight, net.inner.weight)


def test_a_buffer_that_is_expanded(tmp_path: Path) -> None:
    """It is put back in its memory, also where something wrote through what it is a view of."""
    net, opt = begun()
    base = torch.ones(3, 1)
    net.register_buffer("wide", base.expand(3, 8))
    with hu.Audit(opt, "bf16", model=net, rehearse="e5m2") as audit:
        train(net, opt, range(2))
        with audit.as_if("e5m2"):
            base.fill_(2.0)
        assert torch.equal(base, torch.ones(3, 1))
        with audit.as_if("e5m2"):
            net.wide.data = torch.zeros(3, 8)
        assert net.wide.data_ptr() == base.data_ptr()
        audit.evaluate(lambda: loss_of(net, 5))
        audit.save_as_if("e5m2", tmp_path / "m.safetensors")
    assert torch.equal(base.expand(3, 8), net.wide)


def test_questions_without_an_answer(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(
        opt, "bf16", model=net, out=tmp_path / "t", rehearse=hu.Rehearse("e5m2", bounds=["point"])
    ) as audit:
        train(net, opt, range(2))
        for bound, said in (("upper", "not kept"), ("middle", "a bound is one of")):
            with pytest.raises(UsageError, match=said), audit.as_if("e5m2", bound):
                pass
        with pytest.raises(UsageError, match="not rehearsed"), audit.as_if("bf16"):
            pass
        assert set(audit.evaluate(lambda: 1.0).losses["e5m2"]) == {"lower", "point"}
    trace = hu.Trace.open(tmp_path / "t")
    with pytest.raises(UsageError, match="was not rehearsed"):
        trace.forecast("bf16")
    f = trace.forecast("e5m2")
    with pytest.raises(UsageError, match="was not kept"):
        f.frozen(bound="upper")
    with pytest.raises(UsageError, match="was rehearsed"):
        f.frozen("inner.bias")
    with pytest.raises(UsageError, match="was not recorded"):
        f.frozen(bound="lower")
    with hu.Audit(opt, "bf16", model=net) as audit:
        assert audit.evaluate(lambda: 1.0).losses == {}
        with pytest.raises(UsageError, match="rehearses nothing"), audit.as_if("bf16"):
            pass


def test_a_buffer_that_is_replaced_inside(tmp_path: Path) -> None:
    """A module that counts its calls by ``self.calls = self.calls + 1``: the model is as it was."""

    class Counting(torch.nn.Linear):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", rehearse=["bf16"]) as audit:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        before = model.calls
        with audit.as_if("bf16"):
            model(torch.ones(1, 4))
        assert model.calls is before
        assert float(model.calls) == 1
