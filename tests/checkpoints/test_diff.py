"""Two checkpoints compared: every count equals a comparison value by value, in files of any kind."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from halfulp.checkpoints import diff, diff_tensors
from halfulp.checkpoints.diff_page import ROWS
from halfulp.cli import app
from halfulp.errors import HalfulpError, UsageError

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64]


def codes(x: torch.Tensor) -> list[int]:
    """The place of every value among all of its type, in plain integers."""
    bits = 8 * x.element_size()
    raw = x.contiguous().view({8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits])
    found = []
    for n in raw.reshape(-1).tolist():
        n %= 1 << bits
        magnitude = n % (1 << (bits - 1))
        found.append(-magnitude if n >> (bits - 1) else magnitude)
    return found


def brute(a: torch.Tensor, b: torch.Tensor) -> dict[str, int]:
    """The counts of a tensor, one weight after the other."""
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    fine = (torch.isfinite(x) & torch.isfinite(y)).tolist()
    far = [abs(m - n) for m, n, ok in zip(codes(a), codes(b), fine, strict=True) if ok]
    values = [v for v, ok in zip(x.tolist(), fine, strict=True) if ok]
    same = [v for v, d in zip(values, far, strict=True) if d == 0]
    moved = sorted(d for d in far if d)
    return {
        "weights": a.numel(),
        "same": len(same),
        "at_one": same.count(1.0),
        "at_zero": same.count(0.0),
        "one_step": far.count(1),
        "nonfinite": fine.count(False),
        "largest": max(moved, default=0),
        "typical": moved[(len(moved) - 1) // 2] if moved else 0,
    }


def hard(dtype: torch.dtype, n: int = 3000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of every size, signed zeros, ones, infinities, NaN; some moved, by a little or a lot."""
    made = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-12, 5, (n,), generator=made).double())
    a = (torch.randn(n, generator=made, dtype=torch.float64) * scale).to(dtype)
    a[:50], a[50:100], a[100:120] = 1.0, 0.0, -0.0
    b = a.double() * (1 + 0.002 * torch.randn(n, generator=made, dtype=torch.float64))
    b[: n // 2] = a[: n // 2].double()
    b[60:70], b[105:110], b[130:135] = -0.0, 0.0, 7.0
    b = b.to(dtype)
    if dtype != torch.float8_e4m3fn:
        a[200:205], b[203:210] = float("inf"), float("-inf")
    a[220:225], b[222:230] = float("nan"), float("nan")
    return a, b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_are_those_of_a_comparison_by_value(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_tensors, "PIECE", 700)
    a, b = hard(dtype)
    found = diff({"w": a.reshape(30, 100)}, {"w": b.reshape(30, 100)}).tensors[0]
    expected = brute(a, b)
    got = {name: getattr(found, name) for name in expected}
    if expected["typical"] >= diff_tensors.EXACT:  # beyond, by class: the least of one
        assert (
            got["typical"] <= expected["typical"] <= got["typical"] * 2 ** (1 / diff_tensors.PER_BINADE) + 1
        )
        expected["typical"] = got["typical"]
    assert got == expected


def test_all_pairs_of_codes_of_eight_bits() -> None:
    for dtype in DTYPES[:2]:
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        a, b = every.repeat_interleave(256).view(dtype), every.repeat(256).view(dtype)
        found = diff({"w": a}, {"w": b}).tensors[0]
        expected = brute(a, b)
        assert {name: getattr(found, name) for name in expected} == expected


def test_other_types_are_compared_on_the_narrower() -> None:
    a, _ = hard(torch.float32)
    b = a.to(torch.bfloat16)
    found = diff({"w": a}, {"w": b}).tensors[0]
    assert found.kind == "float32 -> bfloat16"
    assert (found.same, found.nonfinite) == (a.numel() - found.nonfinite, brute(b, b)["nonfinite"])
    back = diff({"w": b}, {"w": b.float()})
    assert back.tensors[0].same == found.same
    assert back.tensors[0].kind == "bfloat16 -> float32"


def checkpoints(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    before = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(32, 32).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(64, 32).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.ones(32, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.randn(100, 32).bfloat16(),
    }
    after = {
        k: (v.float() * 1.0005 + 1e-4).bfloat16() if "proj" in k else v.clone() for k, v in before.items()
    }
    return before, after


@pytest.mark.parametrize(
    "how", ["file", "folder", "sharded", "bin", "bin sharded", "pt", "lightning", "memory"]
)
def test_wherever_it_is_stored_it_is_the_same(how: str, tmp_path: Path) -> None:
    pair = checkpoints(tmp_path)
    expected = diff(*pair).table()
    places: list[Any] = []
    for i, held in enumerate(pair):
        folder = tmp_path / str(i)
        folder.mkdir()
        names = list(held)
        match how:
            case "memory":
                places.append(held)
            case "file":
                save_file(held, folder / "m.safetensors")
                places.append(str(folder / "m.safetensors"))
            case "folder":
                save_file(held, folder / "m.safetensors")
                places.append(folder)
            case "bin" | "pt":
                name = "pytorch_model.bin" if how == "bin" else "model.pt"
                torch.save(held, folder / name)
                places.append(folder if how == "bin" else folder / name)
            case "lightning":
                torch.save({"epoch": 1, "state_dict": held}, folder / "last.ckpt")
                places.append(folder / "last.ckpt")
            case _:
                end = "safetensors" if how == "sharded" else "bin"
                save = save_file if how == "sharded" else torch.save
                parts = {f"model-{j}.{end}": names[j::2] for j in range(2)}
                for part, inside in parts.items():
                    save({n: held[n] for n in inside}, folder / part)
                index = {"weight_map": {n: part for part, inside in parts.items() for n in inside}}
                start = "model" if how == "sharded" else "pytorch_model"
                (folder / f"{start}.{end}.index.json").write_text(json.dumps(index))
                places.append(folder)
    got = diff(*places).table()
    assert sorted(got, key=lambda r: r["name"]) == sorted(expected, key=lambda r: r["name"])


def test_what_the_numbers_say(tmp_path: Path) -> None:
    found = diff(*checkpoints(tmp_path))
    said = "\n".join(found.says())
    assert "Norms: 1 of 1 gains still hold exactly 1.0 everywhere" in said
    assert "Lost updates: in bfloat16" in said
    assert "1 tensor did not change at all (3,200 weights, such as model.embed_tokens.weight)" in said
    assert [g.name for g in found.groups] == ["embedding", "attention", "mlp", "norm"]
    text = str(found)
    assert "4 tensors, 6,304 weights" in text
    assert found.page().count("<meter") == 8
    rounded = {"w": torch.randn(64, 64).bfloat16().float()}
    assert "Rounded: 1 of 1 tensors of the second file are float32" in str(
        diff({"w": torch.randn(64, 64)}, rounded)
    )
    good = diff({"w": torch.randn(64, 64)}, {"w": torch.randn(64, 64)})
    assert good.says() == []
    assert good.lines()[-1].startswith("Nothing stands out")


def trained(folder: Path, dtype: torch.dtype, masters: bool) -> Path:
    """A folder as Hugging Face's Trainer leaves one, with an optimizer's state."""
    folder.mkdir()
    model = torch.nn.Linear(8, 8).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(torch.ones(1, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for slot, p in zip(state["state"].values(), model.parameters(), strict=True):
        if masters:
            slot["master_param"] = p.detach().float() * (1 + 2**-12)
        slot["step"] = slot["step"].bfloat16()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(state, folder / "optimizer.pt")
    return folder


def test_states_of_optimizers_by_type(tmp_path: Path) -> None:
    before, after = (
        trained(tmp_path / "a", torch.bfloat16, True),
        trained(tmp_path / "b", torch.bfloat16, False),
    )
    said = str(diff(before, after))
    assert "exp_avg bfloat16 (72)" in said
    assert "a resume dropped them" in said
    assert "Counter: the optimizer's step is counted in 16 bits" in said
    assert "Moments: exp_avg_sq is kept in bfloat16" in said
    assert "dropped" not in str(diff(before, before))
    assert diff(after, before).masters[0].share == 1


def saved(
    folder: Path,
    weights: dict[str, torch.Tensor],
    masters: dict[str, torch.Tensor],
    *,
    named: bool = False,
    step: int = 500,
) -> Path:
    """A checkpoint with masters in its optimizer's state, which numbers them in another order."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    names = sorted(masters, reverse=True)
    state = {
        "state": {i: {"step": float(step), "master": masters[n]} for i, n in enumerate(names)},
        "param_groups": [{"params": list(range(len(names))), **({"param_names": names} if named else {})}],
    }
    torch.save(state, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


@pytest.mark.parametrize("named", [False, True])
def test_masters_that_are_not_the_weights(named: bool, tmp_path: Path) -> None:
    """A master, rounded, is the weight; where it is not, it is counted value by value."""
    made = torch.Generator().manual_seed(0)
    masters = {f"layers.{i}.w": torch.randn(64, 64, generator=made) for i in range(4)}
    masters["norm.weight"] = torch.ones(64) + 1e-4
    weights = {n: m.bfloat16() for n, m in masters.items()}
    sound = saved(tmp_path / "sound", weights, masters, named=named)
    found = diff(sound, sound)
    assert {t.name: t.share for t in found.masters} == dict.fromkeys(masters, 1.0)
    assert not any(said.startswith("Masters") for said in found.says())
    off = {n: (m + 0.01 if n == "layers.2.w" else m) for n, m in masters.items()}
    found = diff(sound, saved(tmp_path / "off", weights, off, named=named))
    if named:
        (row,) = [t for t in found.masters if t.moved]
        expected = brute(weights["layers.2.w"], off["layers.2.w"].bfloat16())
        assert {n: getattr(row, n) for n in expected} == expected
        assert any("Masters: 1 of 5 are not the weights when rounded" in said for said in found.says())
    else:
        assert found.orphans == ["[64, 64]"]
        assert any("Masters: 1 agree with no weight" in said for said in found.says())
    anew = {n: w.float() for n, w in weights.items()}
    found = diff(sound, saved(tmp_path / "anew", weights, anew, named=named, step=20))
    said = "\n".join(found.says())
    assert "Masters: all 5 hold bfloat16 values only" in said
    assert "counted 500 steps in the first checkpoint and 20 in the second" in said
    assert "between steps 500 and 20" in found.lines()[0]


def test_groups_are_their_tensors_together() -> None:
    """Counts and the median of a group are those of all its values at once."""
    pairs = [hard(torch.bfloat16, seed=i) for i in range(3)]
    before, after = ({f"layers.{i}.mlp.weight": p[k] for i, p in enumerate(pairs)} for k in (0, 1))
    found = diff(before, after)
    expected = brute(*(torch.cat(list(x.values())) for x in (before, after)))
    for whole in (found.total, *found.groups):
        assert {name: getattr(whole, name) for name in expected} == expected


def test_an_export_that_rounded() -> None:
    wide = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    said = diff(wide, {"w": wide["w"].bfloat16()}).says()
    assert any(
        "1 tensor went from float32 to bfloat16; the second file is the first, rounded" in s for s in said
    )


def test_averages_and_masters_apart(tmp_path: Path) -> None:
    """A file of torch.save with the masters under a name of their own, as a mapping and as lists."""
    weights = {"a.weight": torch.randn(8, 8).bfloat16(), "b.weight": torch.randn(4, 8).bfloat16()}
    masters = {n: w.float() * (1 + 2**-12) for n, w in weights.items()}
    torch.save({"model": weights, "fp32_params": masters, "ema": weights}, tmp_path / "a.pt")
    torch.save({"model": weights, "fp32_from_fp16": [list(masters.values())]}, tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        found = diff(tmp_path / name, tmp_path / name)
        assert [t.share for t in found.masters] == [1, 1]
        assert any(said.startswith("Average: ema is kept in 16 bits") for said in found.says()) == (
            name == "a.pt"
        )


def test_steps_of_one_run_of_a_trainer(tmp_path: Path) -> None:
    """Two checkpoints as transformers leaves them, equal to a comparison value by value."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.arange(8)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], save_steps=2,
        disable_tqdm=True, use_cpu=True, learning_rate=1e-4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    data: Any = [{"input_ids": ids, "labels": ids}] * 16
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    places = [tmp_path / f"checkpoint-{step}" for step in (2, 4)]
    found = diff(*places)
    held = [load_file(place / "model.safetensors") for place in places]
    assert {t.name for t in found.tensors} == set(held[0])
    for t in found.tensors:
        expected = brute(held[0][t.name], held[1][t.name])
        assert {name: getattr(t, name) for name in expected} == expected
    assert found.steps == (2, 4)
    assert [kept and kept.steps for kept in found.states] == [2, 4]
    assert found.states[1] is not None
    assert set(found.states[1].kinds["exp_avg"]) == {"bfloat16"}
    said = "\n".join(found.says())
    assert "Moments: exp_avg_sq is kept in bfloat16" in said
    assert "5 of 5 gains still hold exactly 1.0 everywhere" in said
    assert "begun anew" not in said
    assert "between steps 2 and 4" in found.lines()[0]


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


def test_hostile_and_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = {"w": torch.ones(3)}
    torch.save({"w": torch.ones(3), "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="which halfulp does not load"):
        diff(tmp_path / "evil.pt", good)
    assert not (tmp_path / "owned").exists()
    whole = tmp_path / "whole.pt"
    torch.save(good, whole)
    content = whole.read_bytes()
    made = np.random.default_rng(0)
    for _ in range(60):
        cut = bytearray(content[: made.integers(0, len(content))])
        for _ in range(made.integers(0, 4)):
            if cut:
                cut[made.integers(0, len(cut))] = made.integers(0, 256)
        (tmp_path / "cut.pt").write_bytes(cut)
        with pytest.raises(HalfulpError):
            diff(tmp_path / "cut.pt", good)
    (tmp_path / "list.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    for bad, says in (
        (tmp_path / "list.pt", "holds no mapping of names to tensors"),
        (tmp_path / "none", "no checkpoint at"),
        ({"v": torch.ones(3)}, "no weights in common"),
        ({"w": torch.ones(4)}, "its shape is"),
        ({"w": torch.ones(3, dtype=torch.int64)}, "int64 is not a type of weights"),
    ):
        with pytest.raises(UsageError, match=says):
            diff(bad, good)


def test_names_are_only_text_on_the_page() -> None:
    hostile = '<img src=x onerror="alert(1)">&\x1b[31m\u202e\'</td><script>'
    held = {hostile: torch.ones(4), **{f"t{i}": torch.zeros(2) for i in range(ROWS + 2)}}
    page = diff(held, held).page()
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;" in page
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", page)
    assert "<div>and 3 more</div>" in page


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a", torch.float32, False)
    (folder / "optimizer.pt").write_bytes(b"garbage")
    assert "optimizer of" in str(diff(folder, folder))
    assert "not read:" in str(diff(folder, folder))


def deep(levels: int) -> Any:
    """A tensor in a list in a list ..."""
    x: Any = torch.ones(1)
    for _ in range(levels):
        x = [x]
    return x


def test_weights_that_are_not_finite_were_not_trained_by_that() -> None:
    """A checkpoint beside itself has lost nothing."""
    held = {"mlp.weight": torch.tensor([float("nan"), 2.0, 3.0, 4.0]).bfloat16()}
    found = diff(held, held)
    assert (found.total.same, found.total.nonfinite, found.says()) == (3, 1, [])


def adam(slot: dict[str, Any], group: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"optimizer": {"state": {0: slot}, "param_groups": [group] if group else []}}


@pytest.fixture
def recursion_limit() -> Iterator[int]:
    before = sys.getrecursionlimit()
    yield before
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (adam({"step": float("nan")}), "a step is nan"),
        (adam({"step": torch.tensor(float("inf"))}), "a step is inf"),
        (adam({"step": torch.ones(1, device="meta")}), "a step is meta float32"),
        (adam({"master": torch.ones(3, device="meta")}), "master is meta float32"),
        (adam({"master": torch.ones(3, 3).to_sparse()}), "master is sparse_coo float32"),
        (adam({"master": torch.ones(1).expand(10**13)}), "master is expanded float32"),
        (adam({}, {"params": [[1]], "param_names": ["a"]}), "unhashable"),
        (adam({"exp_avg": torch.ones(2)}, {"params": 5, "param_names": ["a"]}), "not iterable"),
        ({"ema": deep(3000)}, "recursion"),
    ],
)
def test_states_of_no_known_form_are_named(
    states: dict[str, Any], said: str, tmp_path: Path, recursion_limit: int
) -> None:
    """The weights are compared all the same, and nothing is concluded from states that were not read."""
    weights = {"w": torch.ones(4, 4).bfloat16()}
    torch.save({"model": weights, **adam({"master": torch.ones(4, 4)})}, tmp_path / "a.pt")
    sys.setrecursionlimit(20_000)
    torch.save({"model": weights, **states}, tmp_path / "b.pt")
    sys.setrecursionlimit(recursion_limit)
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.total.share == 1
    kept = found.states[1]
    assert kept is not None
    assert said in str(kept.trouble)
    assert "dropped" not in str(found)


def test_the_command(tmp_path: Path) -> None:
    before, after = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"norm.weight": torch.ones(8).bfloat16(), "w": torch.ones(4)}, before)
    save_file({"norm.weight": torch.ones(8).bfloat16(), "w": torch.tensor([1.0, 1.0, 1.0, 1.5])}, after)
    made = diff(before, after)
    page = tmp_path / "diff.html"
    done = CliRunner().invoke(app, ["diff", str(before), str(after), "--page", str(page)])
    assert (done.exit_code, done.output.splitlines()) == (0, made.lines())
    assert page.read_text() == made.page()
    told = json.loads(CliRunner().invoke(app, ["diff", str(before), str(after), "--json"]).output)["result"]
    assert told["tensors"] == made.table()
    assert told["says"] == made.says()
    assert told == json.loads(json.dumps(made.to_json()))
    for row in [told["total"], *told["groups"]]:  # one number, in JSON, text and page
        assert f"{row['share']:.2%} unchanged" in done.output
        assert f">{row['share']:.1%}<" in page.read_text() or row is told["total"]
    assert f"{told['total']['share']:.2%} unchanged" in page.read_text()
    for option in (["--fail-above", "50%"], ["--fail-stuck"]):
        failed = CliRunner().invoke(app, ["diff", str(before), str(after), *option])
        assert failed.exit_code == 1
        assert f"did not change, {'more than 0.5' if len(option) == 2 else 'such as norm'}" in failed.output
    allowed = CliRunner().invoke(app, ["diff", str(before), str(after), "--fail-above", "95%"])
    assert allowed.exit_code == 0
    assert isinstance(
        CliRunner().invoke(app, ["diff", str(before), str(tmp_path / "c")]).exception, UsageError
    )
