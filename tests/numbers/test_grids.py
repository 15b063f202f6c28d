"""Grids by name: their limits, codes, sizes and words."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from oracle import CONTAINERS, fits, oracle_of

import halfulp as hu
from halfulp.numbers import float_grid, integer_grid
from halfulp.numbers.containers import container
from halfulp.numbers.grid_names import SHOWN
from halfulp.numbers.scaling import Rule, Scaling

ML_DTYPES = [
    "bfloat16", "float16", "float8_e5m2", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e4m3",
    "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e3m4", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
]  # fmt: skip


@pytest.mark.parametrize("name", ML_DTYPES)
def test_limits_are_the_formats(name: str) -> None:
    """Mantissa, limits and width are those that ml_dtypes (NumPy for float16) gives for the type."""
    info = np.finfo(np.float16) if name == "float16" else ml_dtypes.finfo(getattr(ml_dtypes, name))
    g = hu.grid(name)
    assert g.mantissa == info.nmant
    assert g.largest == float(info.max)
    assert g.lo == float(info.min)
    assert g.smallest_normal == float(info.smallest_normal)
    assert g.quantum == float(info.smallest_subnormal)
    assert g.bits == info.bits
    assert g.epsilon == float(info.eps) / 2


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"),
        ("e5m2", "float8_e5m2"), ("e4m3", "float8_e4m3fn"), ("e4m3fn", "float8_e4m3fn"),
        ("e3m4", "float8_e3m4"), ("fp4", "float4_e2m1fn"),
        ("e2m3", "float6_e2m3fn"), ("e3m2", "float6_e3m2fn"), ("e2m1", "float4_e2m1fn"),
        (torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32"),
        (torch.float8_e4m3fn, "float8_e4m3fn"), (torch.float8_e5m2, "float8_e5m2"),
        (torch.float8_e4m3fnuz, "float8_e4m3fnuz"), (torch.float8_e5m2fnuz, "float8_e5m2fnuz"),
    ],
)  # fmt: skip
def test_aliases(alias: str | torch.dtype, name: str) -> None:
    """Short names and torch dtypes mean the canonical grid; a grid means itself."""
    a, b = hu.grid(alias), hu.grid(name)
    assert (a.mantissa, a.emin, a.largest, a.lowest) == (b.mantissa, b.emin, b.largest, b.lowest)
    assert hu.grid(a) is a


@pytest.mark.parametrize("name", SHOWN)
def test_shown_names(name: str) -> None:
    """Every name in the list that errors show is a grid with words for its rules."""
    g = hu.grid(name)
    assert g.name == name
    assert name in str(g)
    assert set(g.rules) == {"ties", "subnormals", "overflow", "zero", "non-finite", "scale"}
    assert g.bytes_per_weight >= g.bits / 8


@pytest.mark.parametrize("scale", [2.0**-9, 0.5, 1, 128, 2.0**20])
def test_scale_is_a_shift(scale: float) -> None:
    """e4m3@S has the values of e4m3 divided by S, and rounds x as e4m3 rounds x S."""
    g, plain = hu.grid(f"e4m3@{scale}"), hu.grid("e4m3")
    assert np.array_equal(g.values() * scale, plain.values())
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(2000) / scale).float()
    assert torch.equal(g.round(x) * scale, plain.round(x * scale))


def test_wide_exponents() -> None:
    """mK has the exponents of its container: m7 in float32 is bfloat16, m10 in float16 is float16."""
    for name, dtype, same in (
        ("m7", torch.float32, "bf16"),
        ("m10", torch.float16, "fp16"),
        ("m23", torch.float32, "fp32"),
    ):
        inside, known = hu.grid(name).within(dtype), hu.grid(same)
        assert (inside.mantissa, inside.emin, inside.largest) == (known.mantissa, known.emin, known.largest)
    assert hu.grid("m7").bits == 16


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers(bits: int) -> None:
    """Symmetric and asymmetric codes, in two's complement."""
    top = 2 ** (bits - 1) - 1
    for name, low in ((f"int{bits}@1", -top), (f"int{bits}@1/asym", -top - 1)):
        g = hu.grid(name)
        assert g.bits == bits
        assert g.values().tolist() == list(range(low, top + 1))
        values = torch.arange(low, top + 1).float()
        assert g.encode(values).tolist() == [v % 2**bits for v in range(low, top + 1)]
        assert torch.equal(g.decode(g.encode(values)), values)


def test_values_are_the_definition() -> None:
    """values() lists what the definition counts, and the index formula of the module gives each magnitude."""
    g = float_grid(mantissa=3, emin=-6, largest=448.0)
    sizes = [n * 2.0**-9 if n <= 8 else (8 + n % 8) * 2.0 ** (-9 + n // 8 - 1) for n in range(127)]
    assert g.values()[-127:].tolist() == sizes
    assert g.last_index == 126
    assert g.values().tolist() == oracle_of(g).floats().tolist()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("bf16", (768, 768), 2 * 768**2), ("e4m3", (5,), 5), ("int3@1", (9,), math.ceil(27 / 8)),
        ("mxfp4", (64, 64), 64 * 64 // 2 + 128), ("mxfp4", (3, 33), math.ceil(99 * 4 / 8) + 6),
        ("nvfp4", (64, 64), 64 * 64 // 2 + 256 + 4), ("int8", (10, 10), 100 + 4),
        ("int8/row", (10, 10), 100 + 40),
        ("int4/g128", (2, 256), 256 + 16), ("int8@100", (10,), 10), ("e4m3", (0,), 0),
    ],
)  # fmt: skip
def test_payload_bytes(name: str, shape: tuple[int, ...], expected: int) -> None:
    """Packed codes and the scales that move: the bytes a tensor takes."""
    assert hu.grid(name).payload_bytes(shape) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", 2), ("e4m3", 1), ("int3@1", 3 / 8), ("int8", 1), ("int8/row", 1), ("mxfp4", 0.5 + 1 / 32),
        ("nvfp4", 0.5 + 1 / 16), ("int4/g128", 0.5 + 4 / 128), ("int4@50/g32", 0.5),
        *((f"mxfp8_{e}", 1 + 1 / 32) for e in ("e4m3", "e5m2")),
        *((f"mxfp6_{e}", 6 / 8 + 1 / 32) for e in ("e2m3", "e3m2")),
    ],
)  # fmt: skip
def test_bytes_a_weight(name: str, expected: float) -> None:
    """What a large tensor takes; a scale that is given is stored nowhere."""
    assert hu.grid(name).bytes_per_weight == expected
    assert abs(hu.grid(name).payload_bytes((1, 2**20)) / 2**20 - expected) < 1e-5


@pytest.mark.parametrize(
    ("grid", "refused"),
    [
        (float_grid(mantissa=2, emin=-2, largest=2.0**16), "float16"),  # too large, and nothing else
        (float_grid(mantissa=2, emin=-23, largest=1.0), "float16"),  # too fine
        (float_grid(mantissa=8, emin=-2, largest=1.0), "bfloat16"),  # too many digits
        (integer_grid(4, rule="given", scale=3e4), "float16"),  # seven times that is too large
        (hu.grid("int5"), "float16"),  # four digits leave seven for a scale
        (hu.grid("int2"), "bfloat16"),
    ],
)
def test_one_limit_is_enough_not_to_fit(grid: hu.Grid, refused: str) -> None:
    with pytest.raises(hu.UsageError, match=f"does not fit {refused}"):
        grid.within(refused)
    assert grid.within("float32") == grid


def test_a_grid_that_nobody_named_says_what_it_is() -> None:
    made = float_grid(mantissa=3, emin=-6, largest=448.0, factor=128)
    assert made.name == "float(m=3,emin=-13,largest=3.5)"
    assert made.values().tolist() == hu.grid("e4m3@128").values().tolist()
    assert integer_grid(4).name == "int4/absmax/tensor"
    assert integer_grid(4, per="group", size=32, symmetric=False).name == "int4/absmax/group32/asym"


def test_a_factor_that_is_no_power_of_two_is_refused_by_name() -> None:
    with pytest.raises(
        hu.UsageError, match=r"the factor of a float grid must be a power of two, such as 4, not 3\.0"
    ):
        float_grid(mantissa=3, emin=-6, largest=448.0, factor=3.0)
    with pytest.raises(
        hu.UsageError, match=r"the factor of e4m3@3 must be a power of two, such as 4, not 3\.0"
    ):
        hu.grid("e4m3@3")


@pytest.mark.parametrize("factor", [0.0, -2.0, 3.0, math.inf, math.nan])
def test_factors_of_other_kinds_are_refused(factor: float) -> None:
    with pytest.raises(hu.UsageError, match="must be a power of two"):
        float_grid(mantissa=3, emin=-6, largest=448.0, factor=factor)


@pytest.mark.parametrize("largest", [math.inf, math.nan, 2.0**-10, 0.0])
def test_a_largest_value_that_is_none_is_refused(largest: float) -> None:
    with pytest.raises(hu.UsageError, match="must be finite and at least one quantum"):
        float_grid(mantissa=3, emin=-6, largest=largest)


@pytest.mark.parametrize(
    ("rule", "scale"),
    [("given", 0.0), ("given", -1.0), ("given", math.inf), ("absmax", 2.0), ("absmax", math.inf)],
)
def test_a_scale_goes_with_the_rule_that_takes_one(rule: Rule, scale: float) -> None:
    with pytest.raises(hu.UsageError, match="takes a positive scale, and only it does"):
        integer_grid(4, rule=rule, scale=scale)


def test_24_bits_of_values_are_listed_and_no_more() -> None:
    assert len(float_grid(mantissa=22, emin=0, largest=1.0).values()) == 2**23 + 1
    with pytest.raises(hu.UsageError, match="too many to list"):
        float_grid(mantissa=23, emin=0, largest=1.0).values()


@pytest.mark.parametrize("text", ["0", "1e999", "0e5"])
def test_a_factor_that_is_no_positive_number_is_refused(text: str) -> None:
    for name in (f"e4m3@{text}", f"int4@{text}"):
        with pytest.raises(hu.UsageError, match=f"must be a positive number, not '{text}'"):
            hu.grid(name)


def test_grids_are_values() -> None:
    """They are equal by what they hold, made by names of it alone, and nobody changes one."""
    g = hu.grid("mxfp4")
    assert g.scaling == Scaling(rule="mx", per="group", size=32, scale=0.0)
    for one in (g, g.scaling, container("float32")):
        assert one is not None
        field = next(iter(one.__dataclass_fields__))
        with pytest.raises(FrozenInstanceError):
            setattr(one, field, "other")
        with pytest.raises(TypeError, match="positional"):
            type(one)("other")  # type: ignore[call-arg, misc]


def test_one_to_52_digits() -> None:
    for mantissa in (1, 52):
        assert float_grid(mantissa=mantissa, emin=0, largest=1.0).mantissa == mantissa
    for mantissa in (0, 53):
        with pytest.raises(hu.UsageError, match=f"1 to 52 bits, not {mantissa} "):
            float_grid(mantissa=mantissa, emin=0, largest=1.0)
    assert hu.grid("m52").mantissa == 52
    with pytest.raises(hu.UsageError, match="unknown grid 'm53'"):
        hu.grid("m53")


def test_what_just_fits() -> None:
    for made in (
        float_grid(mantissa=2, emin=-22, largest=1.0), hu.grid("int4"), hu.grid("int4/g1"),
        float_grid(mantissa=10, emin=-14, largest=65504.0),
        integer_grid(4, rule="given", scale=65504 / 7),
    ):  # fmt: skip
        assert made.within("float16") == made


@pytest.mark.parametrize("bits", [1, 9])
def test_integers_of_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(hu.UsageError, match=f"2 to 8 bits, not {bits}"):
        integer_grid(bits)


@pytest.mark.parametrize("dtype", CONTAINERS, ids=str)
def test_containers(dtype: torch.dtype) -> None:
    """A container's limits are those of its dtype."""
    info, box = torch.finfo(dtype), container(dtype)
    assert box.largest == info.max
    assert math.ldexp(1.0, box.emin) == info.tiny
    assert math.ldexp(1.0, -box.mantissa) == info.eps


CODED = [
    (name, dtype)
    for name in ("e4m3", "bf16", "fp16", "int4@16", "mxfp4", "int8/row", "int4/g16", "nvfp4")
    for dtype in CONTAINERS
    if fits(name, dtype)
]


@pytest.mark.parametrize(("name", "dtype"), CODED, ids=[f"{name} in {dtype}" for name, dtype in CODED])
@pytest.mark.parametrize("shape", [(), (0,), (50,), (7, 90), (2, 3, 40)])
def test_decode_of_encode_is_round(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Codes and scales hold exactly what rounding gives, in any container and shape."""
    g = hu.grid(name)
    x = (torch.from_numpy(np.asarray(np.random.default_rng(2).standard_normal(shape))) * 0.1).to(dtype)
    scales = g.scales(x) if g.scaling is not None else None
    codes = g.encode(x, scale=scales)
    assert codes.dtype == (torch.uint8 if g.bits <= 8 else torch.int32)
    assert torch.equal(g.decode(codes, scale=scales, dtype=dtype), g.round(x))
    out = torch.zeros(shape, dtype=torch.int64)
    assert torch.equal(hu.kernels.encode(x, g, scale=scales, out=out), codes.long())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda g, x: g.round(x, scale=1.0),
            r"scale must be a tensor.*grid\('int8'\).scales\(x\).*not float",
        ),
        (lambda g, x: g.encode(x, scale=1.0), "scale must be a tensor"),
        (lambda g, x: g.decode(x.int(), scale=1.0), "scale must be a tensor"),
        (lambda g, x: g.neighbours(x, scale=1.0), "scale must be a tensor"),
        (lambda g, x: g.gap(x, 1.0), "direction must be a tensor, not float"),
        (lambda g, x: g.round(x, out=1), "out must be a tensor, not int"),
        (lambda g, x: g.decode(x.to(torch.float8_e4m3fn)), r"codes must be integers.*x\.view\(torch.uint8\)"),
    ],
)
def test_arguments_that_are_no_tensors(call: Any, said: str) -> None:
    with pytest.raises(hu.UsageError, match=said):
        call(hu.grid("int8"), torch.ones(4))


@pytest.mark.parametrize(
    "name",
    [
        "m07", "m00", "m-1", "m\uff17", "m7\n", "m7 ", " m7", "M7", "bf16\n", "bf16 ", "\nbf16",
        "bf\uff1116", "e4m3@128\n", "e4m3@ 128", "e4m3@128 ", "e4m3@\uff11\uff12\uff18",
        "e4m3@\u0661\u0662\u0668", "e4m3@0128", "e4m3@+128", "e4m3@1_28", "e4m3@128@128", "e4m3@",
        "e4m3@0x80", "e4m3@1e", "e4m3@.5", "e4m3@inf", "e4m3@nan", "e4m3@0", "int08", "int\uff18",
        "int8\n", "int8/", "int8/row\n", "int4/g016", "int4/g\uff11\uff16", "int4/g16\n", "int4/g0",
        "int8/row/row", "int8/row/g16", "int8/absmax/absmean", "int8/sym/asym", "int8@16/row/g4",
        "mxfp4\n", "nvfp4 ",
        "bf16/", "bf16/row", "",
    ],
)  # fmt: skip
def test_one_spelling_a_name(name: str) -> None:
    """Zeros in front, other digits than ASCII's, spaces, line breaks and options said twice are no names."""
    with pytest.raises(hu.UsageError):
        hu.grid(name)


def test_scales_are_written_as_python_prints_them() -> None:
    for scale in (128, 128.0, 0.5, 2.0**-20, 2.0**70, 1):
        assert hu.grid(f"e4m3@{scale}").largest == 448 / scale


def test_the_limits_of_tf32() -> None:
    """torch has no type of it to compare with: ten digits of float32's."""
    assert hu.grid("tf32")._fixed() == (-126, float.fromhex("0x1.ffcp127"))
    assert hu.grid("tf32").mantissa == 10


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m7", "m7: 16 bits, 7 mantissa, normal from container's, largest container's"),
        ("e4m3", "e4m3: 8 bits, 3 mantissa, normal from 2**-6, largest 448"),
    ],
)
def test_a_grid_in_words(name: str, words: str) -> None:
    assert str(hu.grid(name)) == words


def test_which_scales_are_those_of_the_old_weights() -> None:
    """Those of DQT alone; and a scale of a whole tensor has no size."""
    assert Scaling(rule="absmax") == Scaling(rule="absmax", per="tensor", size=0, scale=0.0)
    scalings = {name: hu.grid(name).scaling for name in ("int3/dqt", "int4", "int4/g32", "mxfp4", "int4@50")}
    assert [name for name, s in scalings.items() if s is not None and s.from_old] == ["int3/dqt"]
    assert {name: s.size for name, s in scalings.items() if s is not None} == {
        "int3/dqt": 0, "int4": 0, "int4/g32": 32, "mxfp4": 32, "int4@50": 0,
    }  # fmt: skip


def test_a_scaled_grid_may_use_all_digits_of_its_container() -> None:
    blocks = hu.grid("mxfp8_e4m3")
    assert replace(blocks, mantissa=7).within(torch.bfloat16).mantissa == 7
    with pytest.raises(
        hu.UsageError, match=r"it has 8 mantissa bits, bfloat16 7\. Keep these weights in float32"
    ):
        replace(blocks, mantissa=8).within(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "scale", "subnormals"),
    [
        ("e4m3@128", "128: the value times 128 is cast", "gradual below 2**-13, spacing 2**-16"),
        ("int4@50", "0.02", "evenly spaced"),
        ("int4/g32", "absmax, one per 32 values, moves with the data", "evenly spaced"),
        ("int3/dqt", "dqt, one per tensor, moves with the data", "evenly spaced"),
        ("nvfp4", "nv, one per 16 values, moves with the data", "gradual below 2**0, spacing 2**-1"),
    ],
)
def test_what_happens_at_the_edges_in_words(name: str, scale: str, subnormals: str) -> None:
    rules = hu.grid(name).rules
    assert (rules["scale"], rules["subnormals"]) == (scale, subnormals)
