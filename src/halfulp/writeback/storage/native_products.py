"""Multiply by float8 weights: ``torch._scaled_mm``, e4m3 forward, e5m2 for gradients, float32 results.

For y = x W^T with stored codes W = s C, three products, each of two float8 operands, summed and returned in
float32:

    forward            y  = x8 C^T    e4m3 x e4m3
    input gradient     dx = g8 C      e5m2 x e4m3
    weight gradient    dW = g8^T x8   e5m2 x e4m3

x8 and g8 are x and g divided by one scale per tensor, the largest magnitude over that of the type, so that
nothing overflows and the largest value is exact. The weights are never decoded; the backward keeps x8, one
byte per number, in place of x. The layouts are those that CUDA needs (the first operand by rows, the second
by columns); a CPU takes any. Rows are padded with zeros to a multiple of 16 on CUDA, which changes no sum.
"""

from __future__ import annotations

from typing import Any

import torch

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def scaled(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in float8 and its scale; zeros stay zeros."""
    top, smallest = torch.finfo(dtype).max, torch.finfo(torch.float32).tiny
    if x.numel() == 0:
        return x.to(dtype), x.new_full((), smallest, dtype=torch.float32)
    scale = (x.abs().amax().float() / top).clamp(min=smallest)
    return (x / scale).to(dtype), scale


def product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Compute a b^T in float32 for float8 matrices stored by rows; empty sums are zero."""
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return all vectors as the rows of a matrix; on CUDA padded with zeros to a multiple of 16 rows."""
    rows = x.reshape(-1, x.shape[-1])
    more = -rows.shape[0] % 16
    return torch.nn.functional.pad(rows, (0, 0, 0, more)) if x.device.type == "cuda" and more else rows


def _shaped(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return rows in the shape and type of the tensor that they were made from."""
    count = like.shape[:-1].numel()
    rows = (rows if len(rows) == count else rows[:count].contiguous()).to(like.dtype)
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(
        rows, [*like.shape[:-1], rows.shape[1]]
    )  # FSDP2 warns of views
    return shaped


class Linear(torch.autograd.Function):
    """The product x W^T of rows x and a native weight W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Multiply in float8."""
        x8, scale = scaled(_rows(x), FORWARD)
        codes, of_codes = weight.codes, x.new_full((), weight.scale, dtype=torch.float32)
        ctx.save_for_backward(x8, scale, of_codes, weight)
        return _shaped(product(x8, codes, scale, of_codes), x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of input and weight, multiplied in float8."""
        x8, scale, of_codes, weight = ctx.saved_tensors
        (g,) = grads
        g8, of_grad = scaled(_rows(g), BACKWARD)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _shaped(product(g8, _turned(weight.codes), of_grad, of_codes), g)
        if ctx.needs_input_grad[1]:
            dw = product(_turned(g8), _turned(x8), of_grad, scale)
        return dx, dw


class EmbeddedRows(torch.autograd.Function):
    """The decoded rows of a native weight, by number."""

    @staticmethod
    def forward(ctx: Any, which: torch.Tensor, weight: Any, padding: int, by_frequency: bool) -> torch.Tensor:
        """Look up rows and decode them."""
        ctx.save_for_backward(which)
        ctx.how = (weight.shape[0], padding, by_frequency)
        rows = torch.embedding(weight.codes.view(torch.uint8), which).view(weight.codes.dtype)
        values: torch.Tensor = rows.float() * weight.scale
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradient of the table."""
        (which,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grads[0], which, *ctx.how), None, None
