"""The names people type for formats and rounding: aliases where there is one meaning, else a clear answer."""

from __future__ import annotations

import re

import ml_dtypes
import pytest
import torch
from typer.testing import CliRunner

import halfulp as hu
from halfulp.audit.rehearsal.specs import Rehearsal
from halfulp.cli import app
from halfulp.writeback import Kahan, Master
from halfulp.writeback.policies import policy

GRIDS = {
    # torch, transformers, accelerate
    "torch.bfloat16": "bf16", "bfloat16": "bf16", "half": "fp16", "torch.half": "fp16", "float": "fp32",
    "torch.float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "torch.float4_e2m1fn_x2": "e2m1",
    # safetensors
    "BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2",
    # ml_dtypes and its MLIR names
    "e4m3fn": "e4m3", "f8E4M3FN": "e4m3", "float6_e2m3fn": "e2m3", "f4E2M1FN": "e2m1",
    # vLLM, TransformerEngine, torchao, Triton
    "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "fp8-e4m3": "e4m3", "E4M3": "e4m3", "E5M2": "e5m2",
    "float8e4nv": "e4m3", "float8e5": "e5m2", "MXFP4": "mxfp4", "NVFP4": "nvfp4", "INT8": "int8",
    # with what halfulp adds
    "fp8_e4m3@128": "e4m3@128", "F8_E4M3@128": "e4m3@128", "INT4/g128": "int4/g128", "i8/row": "int8/row",
}  # fmt: skip


@pytest.mark.parametrize("typed", GRIDS)
def test_other_names_of_grids(typed: str) -> None:
    """The same values, under the name that was typed."""
    found = hu.grid(typed)
    assert found.same_values(hu.grid(GRIDS[typed]))
    assert found.name == typed.removeprefix("torch.")
    assert hu.grid(found.name) == found


def test_float8_e4m3_is_not_float8_e4m3fn() -> None:
    """ml_dtypes has both: the one with infinities ends at 240."""
    assert (hu.grid("float8_e4m3").largest, hu.grid("fp8_e4m3").largest) == (240.0, 448.0)


@pytest.mark.parametrize(
    ("typed", "choices"),
    [
        ("fp8", ["e4m3@128 (", "e4m3 (", "e5m2 (", "mxfp8_e4m3 (", "the value times 128 is cast"]),
        ("FP8", ["e4m3@128 ("]),
        ("float8@128", ["'float8@128'", "e4m3@128 ("]),
        ("mxfp8", ["mxfp8_e4m3 (", "mxfp8_e5m2 ("]),
        ("fp6", ["e2m3 (", "e3m2 ("]),
        ("int4wo", ["int4/g128 (a scale per group of 128)"]),
    ],
)
def test_ambiguous_names_list_the_choices(typed: str, choices: list[str]) -> None:
    with pytest.raises(hu.UsageError, match=r"can mean several grids\. Say which: ") as caught:
        hu.grid(typed)
    for choice in choices:
        assert choice in str(caught.value)
    for name in str(caught.value).partition("Say which: ")[2].split("), "):
        hu.grid(name.split(" ")[0])


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("nf4", "quantiles of a normal distribution"),
        ("NF4", "use int4/g64, mxfp4, nvfp4 or e2m1"),
        ("float8_e8m0fnu", "the scales of MX blocks"),
        ("uint8", "no negative values"),
        ("int16", "2 to 8 bits"),
        ("torch.float64", "only a container here"),
        ("stochastic", "'stochastic' is a policy"),
        ("fp8_e4m4", "Did you mean fp8_e4m3?"),
        ("blfoat16", "Did you mean bfloat16?"),
        ("int4/h128", "unknown option 'h128'"),
    ],
)
def test_names_that_are_no_grid_say_why(typed: str, why: str) -> None:
    with pytest.raises(hu.UsageError) as caught:
        hu.grid(typed)
    assert why in str(caught.value)


TORCH = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
ML_DTYPES = {name: name for name, kind in vars(ml_dtypes).items() if isinstance(kind, type)}
NO_NUMBERS = ("complex", "bit", "info", "bool")


@pytest.mark.parametrize("typed", [n for n in (*TORCH, *ML_DTYPES) if not any(no in n for no in NO_NUMBERS)])
def test_every_dtype_of_torch_and_ml_dtypes_has_an_answer(typed: str) -> None:
    """A grid, or a reason why not."""
    given = {**TORCH, **ML_DTYPES}[typed]
    try:
        answer = str(hu.grid(given))
    except hu.UsageError as error:
        answer = str(error)
    assert "unknown grid" not in answer


POLICIES = {
    "nearest": "rne", "nearest-even": "rne", "round_to_nearest": "rne", "RNE": "rne", "stochastic": "sr",
    "stochastic_rounding": "sr", "bf16_stochastic_round": "sr", "SR": "sr", "deadzone_sr": "deadzone-sr",
    "kahan_sum": "kahan", "Kahan": "kahan", "master_weights": "master", "fp32_master": "master",
    "fp32-master-weights": "master", "store_param_remainders": "remainder16", "ECO": "eco", "DQT": "dqt",
}  # fmt: skip


@pytest.mark.parametrize("typed", POLICIES)
def test_other_names_of_policies(typed: str) -> None:
    assert policy(typed) == policy(POLICIES[typed])


def test_other_names_take_options() -> None:
    assert policy("kahan_sum(dtype=bfloat16)") == Kahan(dtype=torch.bfloat16)
    assert policy("master_weights(start_from=raw)") == Master(start_from="raw")


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("stochastik", "unknown policy 'stochastik'. Did you mean stochastic? Expected one of rne, sr,"),
        ("bf16", "'bf16' is a grid (where values are stored), not a policy"),
        ("fp8", "'fp8' is a grid"),
        ("magic", "unknown policy 'magic'. Expected one of rne, sr,"),
        ("tile_master", "pass halfulp.TileMaster(mask)"),
    ],
)
def test_names_that_are_no_policy_say_why(typed: str, why: str) -> None:
    with pytest.raises(hu.UsageError) as caught:
        policy(typed)
    assert why in str(caught.value)


def test_they_work_end_to_end() -> None:
    """A write-back and a rehearsal by others' names are those by halfulp's own, bit for bit."""

    def trained(grid: str, how: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16)
        optimizer = hu.WriteBack(
            torch.optim.AdamW(model.parameters(), lr=1e-3), grid, how, model=model, seed=1
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained("fp8_e4m3@128", "stochastic"), trained("e4m3@128", "sr"))
    assert Rehearsal.of("bfloat16:stochastic_rounding").name == "bfloat16:sr"
    assert Rehearsal.of("bf16:kahan_sum(dtype=bfloat16)").name == "bf16:kahan(dtype=bfloat16)"
    assert Rehearsal.of("F8_E4M3@128:nearest").name == "F8_E4M3@128"


@pytest.mark.parametrize("grid", ["bf16", "bfloat16", "BF16", torch.bfloat16, "m7"])
def test_remainders_are_for_bf16_by_any_name(grid: str | torch.dtype) -> None:
    model = torch.nn.Linear(4, 4).bfloat16()
    hu.WriteBack(torch.optim.SGD(model.parameters(), lr=0.1), grid, "remainder16", model=model)


@pytest.mark.parametrize(
    "command", [["grids"], ["grids", "--help"], ["audit", "--help"], ["check", "--help"]]
)
def test_commands_say_what_128_is(command: list[str]) -> None:
    """A scale in ``e4m3@128``, a group in ``int4/g128``."""
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).output
    said = " ".join(re.sub("[^ -~]", " ", shown).split())
    assert "a scale of 128" in said
    assert "value times 128 is cast" in said
    assert command[0] == "check" or "a scale per group of 128" in said


def test_a_grid_says_its_scale() -> None:
    assert hu.grid("e4m3@128").rules["scale"] == "128: the value times 128 is cast"
    assert hu.grid("int8@64").rules["scale"] == "0.015625: what a code is worth"
    assert hu.grid("e4m3").rules["scale"] == hu.grid("m7").rules["scale"] == "1"
