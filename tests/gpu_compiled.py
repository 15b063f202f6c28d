"""The Triton kernels compiled ahead of time, on a machine with or without a GPU.

``python tests/gpu_compiled.py`` compiles them for several architectures and prints registers and spills.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from inspect import signature
from pathlib import Path
from typing import Any

from halfulp.kernels import gpu, reference
from halfulp.kernels import gpu_tiles as device
from halfulp.kernels import onepass_reference as onepass

PTXAS = ("--fmad=false", "--regAllocOptLevel=2")  # what Triton passes to the assembler with these options

# name: (type of values, of the float table, of the integer table, TO)
_CONTAINERS = {
    "float32": ("*fp32", "*fp32", "*i32", 0),
    "bfloat16": ("*i16", "*fp32", "*i32", 1),
    "float64": ("*fp64", "*fp64", "*i64", 0),
}
_TYPES = {
    "scales": "*fp64", "old_scales": "*fp64", "next_scales": "*fp64", "sums": "*fp64", "scores": "*fp64",
    "arrived": "*fp64", "counts": "*i32", "shared": "*i32", "phases": "*i64", "moved": "*u8", "row": "i64",
    "per_row": "i64", "length": "i64", "n": "i64", "offset": "i64", "k0": "i32", "k1": "i32",
    "n_grids": "i32", "number": "i32", "rates": "*fp32", "m0": "i32", "m1": "i32", "every": "i32",
}  # fmt: skip
_ROUND: dict[str, Any] = {"MODE": reference.STOCHASTIC, "ALIGNED": True}
_WRITE: dict[str, Any] = {"MODE": reference.DEADZONE, "ALIGNED": True, "MARK": True, "CARRY": 2, "SUMS": True}
_AUDIT: dict[str, Any] = {"AFTER": True, "PHASE": True}
_STEP: dict[str, Any] = {
    "RULE": onepass.ADAMW, "MODE": reference.STOCHASTIC, "KEEPS": onepass.NOTHING, "SMALL": True,
    "EIGHT": False, "DRAWN": True, "MARK": True, "SUMS": True, "ALIGNED": True,
}  # fmt: skip

# The largest form of every kernel (kernel, container, constants), and the commonest.
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(
        ("write_tile", c, _WRITE | {"SCALES": False, "MOVES": False, "CARRY": 0 if c == "bfloat16" else 2})
        for c in _CONTAINERS
    ),
    *(("audit_tile", c, _AUDIT) for c in _CONTAINERS),
    ("round_tile", "float32", _ROUND | {"SCALES": False}),
    ("round_tile", "float32", _ROUND | {"MODE": reference.NEAREST, "SCALES": False}),
    ("round_tile", "float32", _ROUND | {"ALIGNED": False, "SCALES": True}),
    ("write_tile", "float32", _WRITE | {"SCALES": True, "MOVES": True}),
    ("audit_scaled_tile", "bfloat16", {"AFTER": True}),
    *(
        ("score_tile", "float32", {"AFTER": True, "SCALES": scales} | gpu.score_shape(tile))
        for tile in (1, 96, reference.TILE, 1536)
        for scales in (False, True)
    ),
    ("step_tile", "bfloat16", _STEP),
    ("step_tile", "bfloat16", _STEP | {"MODE": reference.NEAREST, "KEEPS": onepass.REMAINDER}),
    (
        "step_tile",
        "float32",
        _STEP | {"DRAWN": False, "MODE": reference.DEADZONE, "KEEPS": onepass.ERROR, "ALIGNED": False},
    ),
    (
        "step_tile",
        "float32",
        _STEP | {"DRAWN": False, "RULE": onepass.NESTEROV, "KEEPS": onepass.CARRY},
    ),
)


def compile_ptx(name: str, holder: str, constants: dict[str, Any], arch: int, **options: Any) -> str:
    """The PTX of one variant for one architecture (80: sm_80), with the options of a launch or others."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from halfulp.kernels import gpu_onepass

    kernel: Any = getattr(gpu_onepass if name == "step_tile" else device, name)
    values, floats, ints, to = _CONTAINERS[holder]
    scaled = constants.get("SCALES", name == "audit_scaled_tile")
    constants = constants | ({} if name == "step_tile" else {"TO": to})
    types = _TYPES | {"f": "*fp64" if scaled else floats, "k": "*i64" if scaled else ints}
    signature = {a: "constexpr" if a in constants else types.get(a, values) for a in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t.startswith("*")}
    made = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", arch, 32),
        options=gpu._options(name, constants) | options,
    )
    return str(made.asm["ptx"])


def _assemble(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread, and bytes spilled, according to the assembler that Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(arch) if signature(get_ptxas).parameters else get_ptxas()  # one for all before 3.5
    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [tool.path, "-v", *PTXAS, f"--gpu-name={found[1]}", source, "-o"]
        log = subprocess.run(
            [*command, Path(folder, "kernel.cubin")], capture_output=True, text=True, check=True
        ).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert registers is not None, log
    return int(registers[1]), sum(int(s) for s in spilled)


def count_hazards(ptx: str) -> dict[str, int]:
    """Instructions that could break equality with the reference, by kind.

    ``fused``: a multiplication with an addition (the one-pass step asks for some). ``approximate``: a
    division or another function. ``flushed``: subnormals taken for zero; not in ``floor``, whose argument is
    never negative here.
    """
    return {
        "fused": len(re.findall(r"\bfma\.", ptx)) + len(re.findall(r"\bfma\.rn\.f32x2\b", ptx)),
        "approximate": len(re.findall(r"\.approx\b|\bdiv\.full\b", ptx)),
        "flushed": len(re.findall(r"\.ftz\b", ptx)) - len(re.findall(r"\bcvt\.rmi\.ftz\b", ptx)),
    }


def compile_report(archs: tuple[int, ...] = (80, 90, 100, 120)) -> list[dict[str, Any]]:
    """Compile every kernel ahead of time, and say what it takes. Needs no GPU."""
    rows = []
    for name, holder, constants in VARIANTS:
        for arch in archs:
            ptx = compile_ptx(name, holder, constants, arch)
            registers, spilled = _assemble(ptx, arch)
            row = {"kernel": name, "container": holder, "constants": constants, "arch": arch}
            row |= {
                "warps": gpu._options(name, constants)["num_warps"],
                "registers": registers,
                "spill_bytes": spilled,
            }
            rows.append(row | count_hazards(ptx))
    return rows


def _print_report() -> None:
    head = f"{'kernel':<18}{'container':<10}{'sm':>4}{'warps':>6}{'registers':>10}{'spills':>7}  constants"
    print(head)
    for row in compile_report():
        constants = " ".join(f"{k}={int(v)}" for k, v in row["constants"].items())
        print(
            f"{row['kernel']:<18}{row['container']:<10}{row['arch']:>4}{row['warps']:>6}"
            f"{row['registers']:>10}{row['spill_bytes']:>7}  {constants}"
        )


if __name__ == "__main__":
    _print_report()
