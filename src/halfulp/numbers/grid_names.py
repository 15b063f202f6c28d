"""Names of grids: ``e4m3@128``, ``int4/g128``, ``mxfp4`` and the others, and what each of them means.

A name is read here and made into a grid by :func:`halfulp.numbers.grids.grid`, which lists the kinds of them.
Other people's names of these are in :mod:`halfulp.numbers.spellings`. A new format of a known kind is a line
in one of the tables.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from halfulp.errors import UsageError
from halfulp.numbers import spellings
from halfulp.numbers.containers import CONTAINERS
from halfulp.numbers.scaling import Per, Rule, Scaling

# name: (mantissa, emin, largest)
_FLOATS: dict[str, tuple[int, int, float]] = {
    "float32": (23, -126, CONTAINERS["float32"].largest),
    "tf32": (10, -126, math.ldexp(2.0 - 2.0**-10, 127)),
    "bfloat16": (7, -126, math.ldexp(2.0 - 2.0**-7, 127)),
    "float16": (10, -14, 65504.0),
    "float8_e5m2": (2, -14, 57344.0),
    "float8_e5m2fnuz": (2, -15, 57344.0),
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e4m3": (3, -6, 240.0),
    "float8_e4m3fnuz": (3, -7, 240.0),
    "float8_e4m3b11fnuz": (3, -10, 30.0),
    "float8_e3m4": (4, -2, 15.5),
    "float6_e2m3fn": (3, 0, 7.5),
    "float6_e3m2fn": (2, -2, 28.0),
    "float4_e2m1fn": (1, 0, 6.0),
}

# name: (element, block size, rule)
_BLOCKS: dict[str, tuple[str, int, Rule]] = {
    "mxfp8_e4m3": ("float8_e4m3fn", 32, "mx"),
    "mxfp8_e5m2": ("float8_e5m2", 32, "mx"),
    "mxfp6_e2m3": ("float6_e2m3fn", 32, "mx"),
    "mxfp6_e3m2": ("float6_e3m2fn", 32, "mx"),
    "mxfp4": ("float4_e2m1fn", 32, "mx"),
    "nvfp4": ("float4_e2m1fn", 16, "nv"),
}

SHOWN = (
    "bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "e3m4", "e2m3", "e3m2", "e2m1", "m7",
    "int8", "int4", "int3/dqt", "int4/absmean", "int8/row", "int4/g128",
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4",
)  # fmt: skip
"""One example of every kind of name, for lists and error messages."""

# One spelling a name: ASCII digits (\\d knows others), no zeros in front, and always fullmatch ($ lets a line
# break pass). A factor is written as Python prints a number.
_INTEGER = re.compile(r"int([2-8])")
_WIDE = re.compile(r"m(0|[1-9][0-9]?)")
_GROUP = re.compile(r"g([1-9][0-9]{0,5})")
_FACTOR = re.compile(r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?")


def parse(spec: str) -> tuple[Literal["float", "integer", "other"], dict[str, Any]]:
    """Read a name.

    Returns:
        The arguments of `float_grid`, of `integer_grid`, or of `Grid` itself.

    Raises:
        UsageError: If no grid has this name.

    >>> parse("m7")
    ('other', {'mantissa': 7, 'emin': None, 'largest': None})
    """
    head, *options = spec.split("/")
    base, _, factor_text = head.partition("@")
    factor = _factor(factor_text, spec) if "@" in head else 1.0
    base = spellings.grid_name(base)
    if match := _INTEGER.fullmatch(base):
        return "integer", _integer(int(match[1]), factor if "@" in head else None, options, spec)
    if not options:
        if base in _FLOATS:
            mantissa, emin, largest = _FLOATS[base]
            return "float", {"mantissa": mantissa, "emin": emin, "largest": largest, "factor": factor}
        if (match := _WIDE.fullmatch(base)) and int(match[1]) <= 52 and "@" not in head:
            return "other", {"mantissa": int(match[1]), "emin": None, "largest": None}
        if base in _BLOCKS and "@" not in head:
            element, size, rule = _BLOCKS[base]
            mantissa, emin, largest = _FLOATS[element]
            scaling = Scaling(rule=rule, per="group", size=size)
            return "other", {"mantissa": mantissa, "emin": emin, "largest": largest, "scaling": scaling}
    others = ("m0 to m52", "int2 to int8", "@S (a scale, a power of two) after a float.")
    raise UsageError(spellings.why_no_grid(spec, (*SHOWN, *_FLOATS, *others)))


def _integer(bits: int, factor: float | None, options: list[str], spec: str) -> dict[str, Any]:
    """Read the options of an integer grid."""
    rule: Rule = "absmax" if factor is None else "given"
    per: Per = "tensor"
    size = 0
    symmetric: bool | None = None
    digits: list[str] = []
    for option in options:
        if option in ("absmax", "absmean", "dqt") and factor is None:
            rule = option  # type: ignore[assignment]  # narrowed by the line above
            digits.append("rule")
        elif option == "row":
            per = "row"
            digits.append("per")
        elif match := _GROUP.fullmatch(option):
            per, size = "group", int(match[1])
            digits.append("per")
        elif option in ("asym", "sym"):
            symmetric = option == "sym"
            digits.append("symmetric")
        else:
            raise UsageError(
                f"unknown option {option!r} in grid {spec!r}: expected absmax, absmean, dqt "
                "(not with @), row, gN, sym or asym."
            )
    if len(set(digits)) < len(digits):
        raise UsageError(
            f"grid {spec!r} says the same thing twice: give a rule, row or gN, and sym or asym once."
        )
    scale = 0.0 if factor is None else 1.0 / factor
    return {"bits": bits, "rule": rule, "per": per, "size": size, "scale": scale, "symmetric": symmetric}


def _factor(text: str, spec: str) -> float:
    factor = float(text) if _FACTOR.fullmatch(text) else math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"the factor in grid {spec!r} must be a positive number, not {text!r}.")
    return factor
