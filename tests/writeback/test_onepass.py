"""One pass equals two: weights, the optimizer's state, what policies keep and events, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onepass_models import adam, assert_same_dicts, both, give_gradients, model_of, plain, sgd

import halfulp as hu
from halfulp.kernels import onepass_reference
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.rules.lion import Lion as PlainLion

SOME = hu.TileMaster(
    {n: torch.arange(-(-p.numel() // 96)) % 3 != 1 for n, p in model_of(torch.float32).named_parameters()},
    tile=96,
)
CASES: dict[str, tuple[Any, Any, str, str | None, torch.dtype]] = {
    "sr": (adam, "sr", "bf16", None, torch.float32),
    "rne": (adam, "rne", "bf16", None, torch.float32),
    "eco": (adam, "eco", "e4m3@128", None, torch.float32),
    "kahan": (adam, "kahan", "bf16", None, torch.float32),
    "master": (adam, "master", "bf16", None, torch.float32),
    "some tiles": (adam, SOME, "e4m3@128", None, torch.float32),
    "some tiles native": (adam, SOME, "bf16", None, torch.bfloat16),
    "some tiles packed": (adam, SOME, "e4m3@128", "packed", torch.float32),
    "deadzone-sr": (adam, "deadzone-sr", "e4m3@128", None, torch.float32),
    "sr native": (adam, "sr", "bf16", None, torch.bfloat16),
    "sr packed": (adam, "sr", "e4m3@128", "packed", torch.float32),
    "sr packed, four bits": (adam, "sr", "e2m1@32", "packed", torch.float32),
    "remainder16": (adam, "remainder16", "bf16", None, torch.bfloat16),
    "remainder8": (adam, "remainder8", "bf16", None, torch.bfloat16),
    "SGD, sr": (sgd, "sr", "bf16", None, torch.bfloat16),
    "SGD, eco": (sgd, "eco", "e4m3@128", None, torch.float32),
    "Nesterov, kahan": (lambda m: sgd(m, nesterov=True), "kahan", "bf16", None, torch.float32),
    "SGD, not fused": (lambda m: sgd(m, fused=False), "sr", "bf16", None, torch.bfloat16),
    "SGD, not fused, eco": (lambda m: sgd(m, fused=False), "eco", "e4m3@128", None, torch.float32),
    "SGD, foreach": (lambda m: sgd(m, fused=False, foreach=True), "kahan", "bf16", None, torch.float32),
    "SGD without momentum": (lambda m: sgd(m, momentum=0), "sr", "bf16", None, torch.bfloat16),
    "SGD without momentum, not fused": (
        lambda m: sgd(m, momentum=0, fused=False),
        "remainder8",
        "bf16",
        None,
        torch.bfloat16,
    ),
    "SGD without momentum, packed": (
        lambda m: sgd(m, momentum=0, fused=False),
        "sr",
        "e2m1@32",
        "packed",
        torch.float32,
    ),
    "AdamW, not fused": (plain, "sr", "bf16", None, torch.float32),
    "AdamW, not fused, native": (plain, "remainder16", "bf16", None, torch.bfloat16),
    "AdamW, not fused, packed": (plain, "sr", "e4m3@128", "packed", torch.float32),
    "AdamW, foreach": (lambda m: plain(m, foreach=True), "kahan", "bf16", None, torch.bfloat16),
    "Adam, not fused": (lambda m: plain(m, torch.optim.Adam), "master", "bf16", None, torch.float32),
    "Lion, sr": (lambda m: PlainLion(m.parameters(), weight_decay=0.1), "sr", "bf16", None, torch.bfloat16),
    "Lion, master": (lambda m: PlainLion(m.parameters()), "master", "bf16", None, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_one_pass_equals_two(name: str) -> None:
    """Weights, the optimizer's state, what policies keep, events."""
    both(*CASES[name])


def test_remainder16_has_the_masters_of_master() -> None:
    """The same gradients give the same masters, bit for bit; weights differ in ties only."""
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16)]
    opts = [
        hu.WriteBack(torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True), "bf16", p, model=m)
        for m, p in zip(models, ("remainder16", "master"), strict=True)
    ]
    for step in range(20):
        for model, opt in zip(models, opts, strict=True):
            give_gradients(model, step)
            opt.step()
    for a, b in zip(opts[0].slots, opts[1].slots, strict=True):
        q = a.p.detach().float().numpy()
        masters = onepass_reference.composed(q, a.state["remainder"].numpy())
        assert np.array_equal(masters, b.state["master"].numpy())
        tie = (masters.view(np.uint32) & 0xFFFF) == 0x8000
        assert np.array_equal((q != b.p.detach().float().numpy()) & ~tie, np.zeros_like(tie))


GIVEN: dict[str, Any] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "every second": lambda g: g.repeat_interleave(2, dim=1)[:, ::2],
    "one for all": lambda g: g[:1, :1].expand(g.shape),
    "subnormal and huge": lambda g: g * 2.0 ** torch.linspace(-149, 124, g.numel()).view(g.shape),
    "bfloat16": lambda g: g.bfloat16().float(),
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "SGD without momentum"])
def test_steps_that_are_not_fused_are_torchs_own(kind: str, given: str) -> None:
    """Masters and moments, however gradients lie in memory, and large enough for several threads."""
    name, *rest = kind.split(maxsplit=1)
    options = {"momentum": 0.0 if rest else 0.9} if name == "SGD" else {}
    runs = []
    for one_pass in (True, False):
        made = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(301, 257, generator=made))
        inner = getattr(torch.optim, name)([("p", p)], lr=1e-2, weight_decay=0.1, **options)
        opt = hu.WriteBack(inner, "bf16", "master", options=WriteBackOptions(one_pass=one_pass))
        for _ in range(3):
            p.grad = GIVEN[given](torch.randn(p.shape, generator=made))
            opt.step()
        assert (opt.routes["p"].name == "one pass") is one_pass
        runs.append([{"p": p.detach(), **opt.slots[0].kept_tensors(), **inner.state[p]}])
    assert_same_dicts(*runs)
