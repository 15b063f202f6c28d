"""Translate the names that people type for number formats and rounding into those of halfulp.

torch, ml_dtypes, safetensors, transformers, torchao, vLLM, Triton, TransformerEngine and bitsandbytes have
names of their own for the same things. A name with one meaning is an alias: ``fp8_e4m3``, ``F8_E4M3`` and
``torch.float8_e4m3fn`` are ``e4m3``. A name with several meanings (``fp8``) is refused with the choices, one
that cannot be a grid (``nf4``) with the reason, and for any other the nearest names are offered. Upper and
lower case are the same in these, and so are ``-`` and ``_``; halfulp's own (``m7``, ``int4/g128``) have one
spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_PREFIXES = ("torch.", "ml_dtypes.", "jnp.", "np.", "tl.")

_GRIDS: Mapping[str, str] = {
    "float32": "fp32 f32 float single e8m23",
    "tf32": "tensorfloat32 e8m10",
    "bfloat16": "bf16 bfloat e8m7",
    "float16": "fp16 f16 half e5m10",
    "float8_e5m2": "e5m2 fp8_e5m2 f8_e5m2 f8e5m2 float8e5 fp8e5",
    "float8_e5m2fnuz": "e5m2fnuz fp8_e5m2fnuz f8_e5m2fnuz f8e5m2fnuz float8e5b16 fp8e5b16",
    "float8_e4m3fn": "e4m3 e4m3fn fp8_e4m3 fp8_e4m3fn f8_e4m3 f8_e4m3fn f8e4m3 f8e4m3fn float8e4nv fp8e4nv",
    "float8_e4m3": "",
    "float8_e4m3fnuz": "e4m3fnuz fp8_e4m3fnuz f8_e4m3fnuz f8e4m3fnuz float8e4b8 fp8e4b8",
    "float8_e4m3b11fnuz": "e4m3b11fnuz f8e4m3b11fnuz",
    "float8_e3m4": "e3m4 fp8_e3m4 f8_e3m4 f8e3m4",
    "float6_e2m3fn": "e2m3 e2m3fn float6_e2m3 fp6_e2m3 f6_e2m3 f6e2m3fn",
    "float6_e3m2fn": "e3m2 e3m2fn float6_e3m2 fp6_e3m2 f6_e3m2 f6e3m2fn",
    "float4_e2m1fn": "e2m1 e2m1fn fp4 float4 float4_e2m1 float4_e2m1fn_x2 fp4_e2m1 f4_e2m1 f4e2m1fn",
    "mxfp8_e4m3": "mxfp8e4m3 mxfp8_e4m3fn",
    "mxfp8_e5m2": "mxfp8e5m2",
    "mxfp6_e2m3": "",
    "mxfp6_e3m2": "",
    "mxfp4": "mxfp4_e2m1 ocp_mxfp4",
    "nvfp4": "nvfp4_e2m1",
    "int8": "i8 s8 qint8",
    "int4": "i4 s4",
}
_POLICIES: Mapping[str, str] = {
    "rne": "nearest nearest_even round_nearest round_to_nearest round_to_nearest_even rtn rtne rn cast",
    "sr": "stochastic stochastic_rounding stochastic_round bf16_stochastic_round use_stochastic_rounding",
    "deadzone-sr": "deadzone deadzone_stochastic",
    "kahan": "kahan_sum kahan_summation use_kahan_summation compensated_summation",
    "master": "masters master_weight master_weights master_weights_fp32 fp32_master fp32_masters "
    "fp32_master_weight fp32_master_weights use_master_weights main_params main_weights",
    "eco": "",
    "remainder16": "remainder store_param_remainders",
    "remainder8": "",
    "dqt": "",
    "tile-master": "tilemaster tile_masters",
}

_WORDS: Mapping[str, str] = {
    "e4m3@128": "fp8 with a scale of 128: the value times 128 is cast, largest 3.5; for weights",
    "e4m3": "fp8 without a scale, largest 448",
    "e5m2": "fp8 with two mantissa bits, largest 57344",
    "mxfp8_e4m3": "e4m3, 32 values share a power of two",
    "mxfp8_e5m2": "e5m2, 32 values share a power of two",
    "e2m3": "three mantissa bits, largest 7.5",
    "e3m2": "two mantissa bits, largest 28",
    "mxfp6_e2m3": "e2m3, 32 values share a power of two",
    "mxfp6_e3m2": "e3m2, 32 values share a power of two",
    "mxfp4": "e2m1, 32 values share a power of two",
    "nvfp4": "e2m1, 16 values share an e4m3 number",
    "int8/row": "one scale per row",
    "int8/g32": "a scale per group of 32",
    "int4/row": "one scale per row",
    "int4/g32": "a scale per group of 32",
    "int4/g128": "a scale per group of 128",
}
_AMBIGUOUS: Mapping[str, str] = {
    "fp8 float8 f8 hybrid fp8_hybrid fp8_inc fbgemm_fp8 float8_weight_only float8wo":
        "e4m3@128 e4m3 e5m2 mxfp8_e4m3 mxfp8_e5m2",
    "mx mxfp8 mx8": "mxfp8_e4m3 mxfp8_e5m2",
    "fp6 float6 f6": "e2m3 e3m2 mxfp6_e2m3 mxfp6_e3m2",
    "mxfp6 mx6": "mxfp6_e2m3 mxfp6_e3m2",
    "8bit load_in_8bit": "int8/row e4m3@128 e5m2",
    "4bit load_in_4bit": "int4/g128 mxfp4 nvfp4",
    "int8wo int8_weight_only w8a8 w8a16 q8_0": "int8/row int8/g32",
    "int4wo int4_weight_only w4a16 awq gptq q4_0 q4_k": "int4/g128 int4/g32 int4/row",
}  # fmt: skip
_REFUSED: Mapping[str, str] = {
    "nf4 normal_float4": "its 16 values are quantiles of a normal distribution, made for weights that do not "
    "train, and no rule of these grids gives them; for 4 bits, use int4/g64, mxfp4, nvfp4 or e2m1",
    "e8m0 ue8m0 float8_e8m0 float8_e8m0fnu f8e8m0fnu": "it holds the scales of MX blocks, not weights; use "
    "mxfp8_e4m3, mxfp4 or the like",
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7 uint8 uint16 uint32 uint64 u8 u4 quint8 quint4x2 quint2x4":
        "it has no negative values; use int8, int4 or another of int2 to int8",
    "int1 int16 int32 int64 int short long qint32 i16 i32 i64":
        "integer grids have 2 to 8 bits: int2 to int8",
    "float64 fp64 f64 double": "it is only a container here, the widest; m52 has its mantissa",
}  # fmt: skip


def _key(name: str) -> str:
    """Normalize a name: drop the differences that have no meaning."""
    low = name.lower()
    prefix = next((p for p in _PREFIXES if low.startswith(p)), "")
    return low.removeprefix(prefix).replace("-", "_")


def _by_spelling(table: Mapping[str, str]) -> dict[str, str]:
    """From every spelling to the name, of a table of names with their other spellings."""
    return {_key(typed): name for name, others in table.items() for typed in (name, *others.split())}


def _single(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table by single names, of one whose keys list several."""
    return {name: value for names, value in table.items() for name in names.split()}


_GRID_NAMED, _POLICY_NAMED = _by_spelling(_GRIDS), _by_spelling(_POLICIES)
_CHOICES, _REASONS = _single(_AMBIGUOUS), _single(_REFUSED)


def grid_name(typed: str) -> str:
    """Find the name that a format has here.

    >>> grid_name("F8_E4M3"), grid_name("torch.half"), grid_name("MXFP4"), grid_name("m7")
    ('float8_e4m3fn', 'float16', 'mxfp4', 'm7')
    """
    return _GRID_NAMED.get(_key(typed), typed)


def policy_name(typed: str) -> str:
    """Find the name that a way to write values has here.

    >>> policy_name("stochastic_rounding"), policy_name("fp32-master"), policy_name("eco")
    ('sr', 'master', 'eco')
    """
    return _POLICY_NAMED.get(_key(typed), typed)


def why_no_grid(typed: str, known: Iterable[str]) -> str:
    """Say why a name is no grid, and which ones it could be.

    >>> print(why_no_grid("mxfp8", ()))
    'mxfp8' can mean several grids. Say which: mxfp8_e4m3 (e4m3, 32 values share a power of two), ...
    >>> print(why_no_grid("fp8_e4m4", ["bf16", "e4m3"]))
    unknown grid 'fp8_e4m4'. Did you mean fp8_e4m3? Known: bf16, e4m3
    """
    key = _key(typed.partition("/")[0].partition("@")[0])
    if key in _REASONS:
        return f"{typed!r} cannot be a grid: {_REASONS[key]}."
    if key in _CHOICES:
        choices = ", ".join(f"{name} ({_WORDS[name]})" for name in _CHOICES[key].split())
        return f"{typed!r} can mean several grids. Say which: {choices}."
    if key in _POLICY_NAMED:
        return f"{typed!r} is a policy (how values are written), not a grid (where they are stored)."
    if any(c.isspace() for c in typed.strip()):
        return f"unknown grid {typed!r}: separate several names with commas, such as bf16,e5m2."
    names = list(known)
    return f"unknown grid {typed!r}.{_nearest(typed, (*names, *_GRID_NAMED))} Known: {', '.join(names)}"


def why_no_policy(typed: str, known: Iterable[str]) -> str:
    """Say why a name is no policy, and which ones come near.

    >>> print(why_no_policy("stochastik", ()))
    unknown policy 'stochastik'. Did you mean stochastic?
    """
    key = _key(typed)
    if key in _GRID_NAMED or key in _CHOICES or key in _REASONS:
        return f"{typed!r} is a grid (where values are stored), not a policy (how they are written)."
    return f"unknown policy {typed!r}.{_nearest(typed, (*known, *_POLICY_NAMED))}"


def _nearest(typed: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(_key(typed), dict.fromkeys(known), n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""
