"""What makes no sense is refused, with a HalfulpError that names the offending thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp import errors, kernels, measures
from halfulp.numbers import float_grid, integer_grid

ONES = torch.ones(4)
STREAM = hu.Stream(seed=0, name="w")
META = torch.ones(4, device="meta")
NESTED = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def test_every_error_is_a_halfulp_error() -> None:
    """One root; a usage error is also a ValueError."""
    for name in ("UsageError", "CorruptionError", "TamperingError", "VersionError"):
        assert issubclass(getattr(errors, name), hu.HalfulpError)
    assert issubclass(hu.UsageError, ValueError)


# what is called, and what the message must say
NAMES: list[tuple[Any, list[str]]] = [
    ("fp12", ["fp12", "bf16", "e4m3@128", "mxfp4", "int3/dqt", "float8_e4m3fn"]),
    ("", ["unknown grid ''"]),
    ("M7", ["M7"]),
    ("m53", ["m53"]),
    ("m7@2", ["m7@2"]),
    ("mxfp4@2", ["mxfp4@2"]),
    ("e4m3/row", ["e4m3/row"]),
    ("int9", ["int9"]),
    ("int1", ["int1"]),
    ("e4m3@100", ["e4m3@100", "power of two", "100"]),
    ("e4m3@", ["e4m3@", "positive number"]),
    ("e4m3@x", ["'x'", "positive number"]),
    ("e4m3@-128", ["'-128'", "positive"]),
    ("e4m3@0", ["'0'", "positive"]),
    ("e4m3@inf", ["'inf'", "positive"]),
    ("int8@nan", ["'nan'", "positive"]),
    ("int4/absmx", ["'absmx'", "int4/absmx", "absmax"]),
    ("int4@16/absmax", ["'absmax'", "int4@16/absmax"]),
    ("int4/g0", ["'g0'"]),
    (7, ["int"]),
    (None, ["NoneType"]),
    (torch.int32, ["int32"]),
]


@pytest.mark.parametrize(("name", "said"), NAMES, ids=[str(n) for n, _ in NAMES])
def test_unknown_grids(name: Any, said: list[str]) -> None:
    """A name that is no grid, a scale that is no scale, an option that is none."""
    with pytest.raises(hu.UsageError) as caught:
        hu.grid(name)
    for word in said:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mantissa": 0, "emin": 0, "largest": 1.0}, "mantissa"),
        ({"mantissa": 53, "emin": 0, "largest": 1.0}, "mantissa"),
        ({"mantissa": 2, "emin": 0, "largest": math.inf}, "largest"),
        ({"mantissa": 2, "emin": 0, "largest": 0.1}, "largest"),
        ({"mantissa": 2, "emin": 0, "largest": 1.1}, "1.1"),
        ({"mantissa": 2, "emin": 0, "largest": 1.0, "factor": 3.0}, "power of two"),
        ({"mantissa": 2, "emin": 0, "largest": 1.0, "factor": -2.0}, "power of two"),
    ],
)
def test_impossible_float_grids(arguments: dict[str, Any], said: str) -> None:
    """Limits that no float has."""
    with pytest.raises(hu.UsageError, match=said):
        float_grid(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bits": 1}, "2 to 8 bits"), ({"bits": 9}, "9"), ({"bits": 4, "rule": "mx"}, "mx"),
        ({"bits": 4, "per": "group"}, "group"), ({"bits": 4, "size": 3}, "size=3"),
        ({"bits": 4, "rule": "given"}, "scale"), ({"bits": 4, "scale": 0.1}, "scale=0.1"),
        ({"bits": 4, "rule": "given", "scale": math.inf}, "inf"),
    ],
)  # fmt: skip
def test_impossible_integer_grids(arguments: dict[str, Any], said: str) -> None:
    """Bits, rules and scales that do not go together."""
    with pytest.raises(hu.UsageError, match=said):
        integer_grid(**arguments)


@pytest.mark.parametrize(
    ("name", "dtype", "fits"),
    [
        ("m10", torch.bfloat16, False), ("int8", torch.bfloat16, False), ("int8", torch.float16, False),
        ("int4/g128", torch.float16, True), ("mxfp4", torch.bfloat16, True),
        ("mxfp8_e5m2", torch.float16, True),
        ("fp16", torch.bfloat16, False), ("bf16", torch.float16, False),
        ("e5m2", torch.bfloat16, True), ("e5m2", torch.float16, True),
        ("float8_e5m2fnuz", torch.float16, True), ("e4m3@128", torch.float16, True),
        ("e4m3@1048576", torch.float16, False), ("e4m3@0.001953125", torch.float16, False),
        ("float32", torch.bfloat16, False), ("m23", torch.float32, True), ("m24", torch.float32, False),
        ("m24", torch.float64, True), ("int8@128", torch.bfloat16, True), ("e3m4", torch.bfloat16, True),
        ("bf16", torch.float64, True), ("m52", torch.float64, True),
    ],
)  # fmt: skip
def test_grids_that_do_not_fit(name: str, dtype: torch.dtype, fits: bool) -> None:
    """A grid with more bits or range than its container is refused; both are named."""
    x = torch.ones(3, dtype=dtype)
    if fits:
        assert hu.grid(name).round(x).dtype == dtype
        return
    with pytest.raises(hu.UsageError, match="does not fit") as caught:
        hu.grid(name).round(x)
    assert name in str(caught.value)
    assert str(dtype).removeprefix("torch.") in str(caught.value)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "round": lambda x: kernels.round(x, "e4m3"),
    "scales": lambda x: kernels.scales(x, "int8"),
    "audit": lambda x: kernels.audit(x, x, ["e4m3"]),
    "write_back": lambda x: kernels.write_back(x, x, "e4m3"),
    "score": lambda x: kernels.score(x, x, x, "e4m3"),
    "encode": lambda x: kernels.encode(x, "e4m3"),
    "neighbours": lambda x: hu.grid("e4m3").neighbours(x),
    "gap": lambda x: hu.grid("e4m3").gap(x, ONES),
    "frozen": lambda x: hu.frozen(x, x, "e4m3"),
    "margin": lambda x: measures.margin(x, x, "e4m3"),
    "symmetric_frozen": lambda x: measures.symmetric_frozen(x, x, "e4m3"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(4, dtype=torch.int32), "int32"), (torch.ones(4, dtype=torch.complex64), "complex64"),
        (torch.ones(4, dtype=torch.bool), "bool"), (torch.ones(4).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (META, "meta"), (torch.ones(4).to_sparse(), "sparse"),
    ],
    ids=["int32", "complex64", "bool", "float8", "meta", "sparse"],
)  # fmt: skip
def test_tensors_without_grid_values(call: str, x: torch.Tensor, said: str) -> None:
    """Integers, complex numbers, packed codes, and tensors without values or of another layout."""
    with pytest.raises(hu.UsageError, match=said):
        CALLS[call](x)


MISMATCHES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "not a tensor": (lambda: kernels.round([1.0], "e4m3"), ["x", "list"]),  # type: ignore[arg-type]
    "out shape": (lambda: kernels.round(ONES, "e4m3", out=torch.ones(5)), ["out", "(5,)", "(4,)"]),
    "out dtype": (lambda: kernels.round(ONES, "e4m3", out=ONES.bfloat16()), ["out", "bfloat16", "float32"]),
    "out wider": (lambda: kernels.round(ONES, "e4m3", out=ONES.double()), ["out", "float64", "float32"]),
    "out integer": (
        lambda: kernels.round(ONES, "e4m3", out=torch.ones(4, dtype=torch.int32)),
        ["out", "int32"],
    ),
    "out expanded": (lambda: kernels.round(ONES, "e4m3", out=torch.ones(1).expand(4)), ["out", "expanded"]),
    "z expanded": (lambda: kernels.write_back(ONES, torch.ones(1).expand(4), "e4m3"), ["expanded"]),
    "audit shape": (lambda: kernels.audit(ONES, torch.ones(2, 2), ["e4m3"]), ["d", "(2, 2)", "(4,)"]),
    "audit device": (lambda: kernels.audit(ONES, META, ["e4m3"]), ["d", "meta"]),
    "audit dtype": (lambda: kernels.audit(ONES, ONES.double(), ["e4m3"]), ["d", "float64", "float32"]),
    "audit proposals of integers": (
        lambda: kernels.audit(ONES, torch.ones(4, dtype=torch.int8), ["e4m3"]),
        ["int8"],
    ),
    "score shape": (lambda: kernels.score(ONES, torch.ones(3), ONES, "e4m3"), ["g", "(3,)", "(4,)"]),
    "score dtype": (lambda: kernels.score(ONES, ONES, ONES.double(), "e4m3"), ["u", "float64", "float32"]),
    "write-back shape": (lambda: kernels.write_back(ONES, torch.ones(3), "e4m3"), ["z", "(3,)"]),
    "write-back dtype": (lambda: kernels.write_back(ONES, ONES.double(), "e4m3"), ["float64", "float32"]),
    "write-back out": (lambda: kernels.write_back(ONES, ONES, "e4m3", out=ONES.half()), ["float16"]),
    "mode": (lambda: kernels.write_back(ONES, ONES, "e4m3", "nearset"), ["nearset", "deadzone"]),  # type: ignore[arg-type]
    "moved size": (
        lambda: kernels.write_back(ONES, ONES, "e4m3", moved=torch.zeros(2, dtype=torch.uint8)),
        ["moved", "1"],
    ),
    "moved dtype": (lambda: kernels.write_back(ONES, ONES, "e4m3", moved=torch.zeros(1)), ["moved", "uint8"]),
    "no stream": (lambda: kernels.write_back(ONES, ONES, "e4m3", "stochastic"), ["stream", "None"]),
    "bad stream": (lambda: kernels.round(ONES, "e4m3", stochastic=42), ["stream", "42"]),  # type: ignore[arg-type]
    "generator": (lambda: hu.grid("e4m3").round(ONES, torch.Generator()), ["stream", "Generator"]),  # type: ignore[arg-type]
    "scale for none": (lambda: kernels.round(ONES, "e4m3", scale=torch.ones(1)), ["e4m3", "scale"]),
    "scales, too many": (lambda: kernels.round(ONES, "int8", scale=torch.ones(2)), ["int8", "1 scale", "2"]),
    "frozen shape": (lambda: hu.frozen(ONES, torch.ones(3), "e4m3"), ["d", "(3,)", "(4,)"]),
    "symmetric shape": (
        lambda: measures.symmetric_frozen(ONES, torch.ones(3), "e4m3"),
        ["d", "(3,)", "(4,)"],
    ),
    "margin shape": (lambda: measures.margin(ONES, torch.ones(3), "e4m3"), ["d", "(3,)", "(4,)"]),
    "margin of a moving grid": (lambda: measures.margin(ONES, ONES, "int8"), ["int8"]),
    "limits of the container": (lambda: hu.grid("m7").values(), ["m7", "within"]),
    "too many values": (lambda: hu.grid("float32").values(), ["float32", "32"]),
    "encode NaN": (
        lambda: hu.grid("e4m3").encode(torch.tensor([1.0, math.nan, math.inf])),
        ["2 non-finite", "index 1", "e4m3"],
    ),
    "encode infinity": (
        lambda: hu.grid("mxfp4").encode(torch.tensor([math.inf])),
        ["1 non-finite", "index 0"],
    ),
    "decode NaN's code": (lambda: hu.grid("e4m3").decode(torch.tensor([0, 127])), ["e4m3", "127"]),
    "decode too large": (lambda: hu.grid("int4@16").decode(torch.tensor([16])), ["int4@16", "16"]),
    "decode negative": (lambda: hu.grid("e4m3").decode(torch.tensor([-1])), ["e4m3", "-1"]),
    "decode asymmetric": (lambda: hu.grid("int4@16").decode(torch.tensor([8])), ["int4@16"]),
    "decode floats": (lambda: hu.grid("e4m3").decode(torch.ones(1)), ["integers", "float32"]),
    "decode without scales": (lambda: hu.grid("mxfp4").decode(torch.tensor([1])), ["mxfp4", "scales"]),
    "decode wide": (lambda: hu.grid("float32").decode(torch.tensor([1])), ["float32", "16"]),
    "decode meta": (lambda: hu.grid("e4m3").decode(META.to(torch.uint8)), ["meta"]),
    "decode a list": (lambda: hu.grid("e4m3").decode([1]), ["list"]),  # type: ignore[arg-type]
    "no mantissa in float16": (lambda: kernels.round(ONES.half(), "m0"), ["m0"]),
    "nested": (lambda: hu.grid("e4m3").round(NESTED), ["nested", "unbind"]),
    "rho of integers": (lambda: measures.rho(ONES.bool(), ONES, "e4m3"), ["bool"]),
    "rho of float8": (lambda: measures.rho(ONES, ONES.to(torch.float8_e4m3fn), "e4m3"), ["float8_e4m3fn"]),
    "rho of sparse": (lambda: measures.rho(ONES, ONES.to_sparse(), "e4m3"), ["d", "sparse_coo"]),
    "rho of numbers": (lambda: measures.rho(1.0, ONES, "e4m3"), ["w", "float"]),  # type: ignore[arg-type]
    "phase of a list": (lambda: measures.phase([1.0]), ["w", "list"]),  # type: ignore[arg-type]
    "container": (lambda: hu.grid("e4m3").within(torch.int8), ["int8", "float32"]),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatches(what: str) -> None:
    """Shapes, types, streams, scales and codes that do not belong together."""
    call, said = MISMATCHES[what]
    with pytest.raises(hu.UsageError) as caught:
        call()
    for word in said:
        assert word in str(caught.value), str(caught.value)


def test_a_refused_call_changes_nothing() -> None:
    """The stored values are as they were after a refusal."""
    q, z = torch.ones(4), torch.full((4,), 1.3)
    with pytest.raises(hu.UsageError):
        kernels.write_back(q, z, "e4m3", "stochastic")
    with pytest.raises(hu.UsageError):
        kernels.round(z, "e4m3", STREAM, out=z[:3])
    assert q.tolist() == [1.0] * 4
    assert torch.equal(z, torch.full((4,), 1.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_views_that_are_negated_when_they_are_read(dtype: torch.dtype) -> None:
    """They have their values, and take results."""
    x = torch.tensor([1.06, -2.2, 0.0], dtype=dtype)
    view = torch._neg_view(x)
    assert torch.equal(hu.grid("e4m3").round(view), hu.grid("e4m3").round(-x))
    assert torch.equal(hu.frozen(view, view, "e4m3"), hu.frozen(-x, -x, "e4m3"))
    out = torch._neg_view(torch.empty_like(x))
    kernels.round(x, "e4m3", out=out)
    assert torch.equal(out, hu.grid("e4m3").round(x))
