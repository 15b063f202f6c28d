"""Where torch, ml_dtypes and gfloat differ from each other and from halfulp: the rows of docs/comparison.md.

``python tests/comparison.py`` rewrites the table in place; a test holds the page to it.
"""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path

import gfloat
import ml_dtypes
import numpy as np
import torch
from gfloat import formats

import halfulp as hu

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
HEAD = "| format | value | torch | ml_dtypes | gfloat | gfloat, `sat=True` | halfulp |"
RULE = "|---|---|---|---|---|---|---|"

# our name: gfloat's description, where it has one
GFLOAT = {
    "bfloat16": formats.format_info_bfloat16,
    "float16": formats.format_info_binary16,
    "float8_e4m3fn": formats.format_info_ocp_e4m3,
    "float8_e5m2": formats.format_info_ocp_e5m2,
    "float6_e2m3fn": formats.format_info_ocp_e2m3,
    "float6_e3m2fn": formats.format_info_ocp_e3m2,
    "float4_e2m1fn": formats.format_info_ocp_e2m1,
}
FORMATS = (
    "bfloat16", "float16", "float8_e5m2", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e4m3",
    "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e3m4", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
)  # fmt: skip


def with_torch(name: str, x: np.ndarray) -> np.ndarray | None:
    """The values after torch's cast, or None where torch has no such type."""
    dtype = getattr(torch, name, None)
    return None if dtype is None else torch.from_numpy(x).to(dtype).double().numpy()


def with_ml_dtypes(name: str, x: np.ndarray) -> np.ndarray:
    """The values after ml_dtypes' cast; float16 is NumPy's own."""
    dtype = np.float16 if name == "float16" else getattr(ml_dtypes, name)
    with np.errstate(all="ignore"):
        return x.astype(dtype).astype(np.float64)


def with_gfloat(name: str, x: np.ndarray, sat: bool = False) -> np.ndarray | None:
    """The values that gfloat rounds to, or None where it does not describe the format."""
    if name not in GFLOAT:
        return None
    return gfloat.round_ndarray(GFLOAT[name], x.astype(np.float64), sat=sat)


def with_halfulp(name: str, x: np.ndarray) -> np.ndarray:
    return hu.grid(name).round(torch.from_numpy(x)).double().numpy()


def _shown(name: str, x: np.ndarray, how: str) -> str:
    try:
        r = {
            "torch": with_torch,
            "ml_dtypes": with_ml_dtypes,
            "gfloat": with_gfloat,
            "sat": lambda n, v: with_gfloat(n, v, sat=True),
            "halfulp": with_halfulp,
        }[how](name, x)
    except ValueError:
        return "error"
    return "" if r is None else f"{r[0]:.6g}"


def _values(name: str) -> list[tuple[str, float]]:
    """What to try: the end of the range, what is not a number, zero, and a float64 beside a tie."""
    g = hu.grid(name)
    assert g.largest is not None
    top = g.largest
    gap = top - float(g.neighbours(torch.tensor([top], dtype=torch.float64))[0])
    one = 1.0 + 1.5 * 2.0**-g.mantissa  # a tie, which would go up
    return [
        (f"{top:.6g}, the largest", top),
        (f"{top + 0.49 * gap:.6g}, less than half a gap above", top + 0.49 * gap),
        (f"{top + gap / 2:.6g}, half a gap above", top + gap / 2),
        (f"{top + 0.51 * gap:.6g}, more than half a gap above", top + 0.51 * gap),
        ("infinity", math.inf),
        ("NaN", math.nan),
        ("-0.0", -0.0),
        (f"{-g.quantum / 2:.6g}, half the smallest code", -g.quantum / 2),
        (f"{one:.6g} - 2**-40, a float64", one - 2.0**-40),
    ]


def rows() -> list[str]:
    """One row for every value on which not all agree."""
    found = []
    for name in FORMATS:
        for label, value in _values(name):
            x = np.array([value], dtype=np.float64 if "float64" in label else np.float32)
            shown = [_shown(name, x, how) for how in ("torch", "ml_dtypes", "gfloat", "sat", "halfulp")]
            if len({s for s in shown if s}) > 1:
                found.append("| " + " | ".join([f"`{name}`", label, *shown]) + " |")
    return found


def versions() -> str:
    """What the table was made with."""
    installed = ", ".join(f"{p} {version(p).split('+')[0]}" for p in ("torch", "ml_dtypes", "gfloat"))
    return f"Made with {installed}."


def rewritten(page: str) -> str:
    """The page with its table and versions made anew."""
    before, _, rest = page.partition(HEAD)
    _, _, after = rest.partition("\n\n")
    lines = [line if not line.startswith("Made with ") else versions() for line in before.splitlines()]
    return "\n".join([*lines, HEAD, RULE, *rows()]) + "\n\n" + after


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
