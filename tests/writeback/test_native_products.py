"""Products with float8 codes: exact on what was rounded, and embeddings are torch's."""

from __future__ import annotations

import pytest
import torch
from native_models import SCALE, Net
from oracle import assert_same

import halfulp as hu
from halfulp.writeback.storage import native_products as gemm
from halfulp.writeback.storage.native_weight import (
    NativeWeight,
    plain,
)

EXACT = torch.finfo(torch.float32).eps


def test_products_are_within_the_bound_of_the_format() -> None:
    """Exact on what was rounded, but for the order of a float32 sum; and the rounding is half a gap each."""
    torch.manual_seed(1)
    x = torch.randn(2, 16, 48, requires_grad=True)
    weight = NativeWeight((torch.randn(32, 48) * 100).to(torch.float8_e4m3fn), SCALE)
    p = torch.nn.Parameter(weight)
    y = torch.nn.functional.linear(x, p)
    g = torch.randn_like(y)
    y.backward(g)
    w, rows, out = weight.decoded(), x.detach().reshape(-1, 48), g.reshape(-1, 32)
    (x8, sx), (g8, sg) = gemm.scaled(rows, gemm.FORWARD), gemm.scaled(out, gemm.BACKWARD)
    xq, gq = x8.float() * sx, g8.float() * sg
    assert x.grad is not None
    assert p.grad is not None
    for found, a, b in (
        (y.detach().reshape(-1, 32), xq, w.t()), (x.grad.reshape(-1, 48), gq, w), (p.grad, gq.t(), xq),
    ):  # fmt: skip
        # n products and n additions of float32, and two scalings.
        bound = (2 * a.shape[1] + 2) * EXACT * (a.abs() @ b.abs())
        assert ((found - a @ b).abs() <= bound).all()
    # Half a gap: 2^-4 of a normal e4m3 number (2^-3 for e5m2), or half the smallest subnormal.
    assert ((xq - rows).abs() <= (rows.abs() * 2**-4).clamp(min=float(sx) * 2**-10) * (1 + 4 * EXACT)).all()
    assert ((gq - out).abs() <= (out.abs() * 2**-3).clamp(min=float(sg) * 2**-17) * (1 + 4 * EXACT)).all()
    assert p.grad.dtype == torch.float32
    assert not isinstance(p.grad, NativeWeight)


def test_scales_of_zeros_and_of_what_is_not_finite() -> None:
    zeros, _ = gemm.scaled(torch.zeros(3, 4), gemm.FORWARD)
    assert not zeros.float().any()
    bad, scale = gemm.scaled(torch.tensor([[1.0, torch.inf]]), gemm.BACKWARD)
    assert not torch.isfinite(bad.float() * scale).all()  # seen, not hidden


def test_an_embedding_is_torchs() -> None:
    """Lookups and their gradients, padding included."""
    model = Net()
    hu.native(model)
    table = model.rows.weight
    boxed = torch.nn.Parameter(plain(table.detach()))
    which = torch.tensor([[1, 3, 3], [0, 23, 1]])
    for padding in (None, 1, -1):
        found = [torch.nn.functional.embedding(which, w, padding) for w in (table, boxed)]
        assert_same(found[0].detach(), found[1].detach(), "rows")
        grads = [torch.autograd.grad(f.sin().sum(), w)[0] for f, w in zip(found, (table, boxed), strict=True)]
        assert_same(grads[0], grads[1], "gradient")


def test_no_rows_at_all() -> None:
    """As an expert that gets no tokens: a result of no rows, and gradients of zero."""
    model = torch.nn.Linear(16, 32)
    hu.native(model)
    x = torch.zeros(0, 16, requires_grad=True)
    y = model(x)
    assert y.shape == (0, 32)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 16)
    assert not model.weight.grad.any()


def test_rows_that_an_embedding_has_not() -> None:
    """Refused as by torch, also where counting from the end would find one."""
    model = torch.nn.Embedding(8, 16)
    hu.native(model)
    for which in (-1, 8):
        with pytest.raises(IndexError):
            model(torch.tensor([which]))
