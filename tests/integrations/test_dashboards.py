"""Dashboards, with the libraries themselves; nothing is imported before it is used."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import made, train
from integrations.trainers import board, history, single

import halfulp as hu
from halfulp.integrations.scalars import Scalars, tag

# Other people's libraries warn as they like.
pytestmark = pytest.mark.filterwarnings("default")


OPTIONAL = ("transformers", "accelerate", "lightning", "pytorch_lightning", "tensorboard", "wandb")


def test_importing_halfulp_imports_none_of_them() -> None:
    code = (
        "import sys, halfulp, halfulp.integrations, halfulp.cli\n"
        f"print([m for m in {OPTIONAL!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment(),
    )
    assert done.stdout.strip() == "[]"


def test_without_the_library_there_is_a_clear_error() -> None:
    """Modules can be imported; using them says what to install."""
    code = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
from halfulp.integrations import huggingface, lightning, tensorboard, wandb
for make in (
    lambda: huggingface.AuditCallback(["bf16"]), lambda: lightning.AuditCallback(["bf16"]),
    lambda: tensorboard.TensorBoard("board"), wandb.WandB,
):
    try:
        make()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment(),
    )
    assert [line.split()[2].rstrip(",") for line in done.stdout.splitlines()] == [
        "transformers", "lightning", "tensorboard", "wandb",
    ]  # fmt: skip
    assert done.stdout.count("pip install") == 4


def environment() -> dict[str, str]:
    places = [str(Path(hu.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in places if p)}


def summary(step: int = 1, **tensors: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.0,
        "lr": 0.1,
        "frozen": {"bf16": 0.25},
        "never_moved": {"bf16": 0.125},
        "tensors": {name: {"bf16": share} for name, share in tensors.items()},
        "update_ratio": 0.001,
        "nonfinite": 0,
    }


def test_the_worst_tensors_are_shown_and_stay() -> None:
    scalars = Scalars(worst=2)
    first = scalars.of(summary(a=0.1, b=0.6, c=0.4))
    assert first == {
        "halfulp/frozen/bf16": 0.25,
        "halfulp/never_moved/bf16": 0.125,
        "halfulp/update_ratio": 0.001,
        "halfulp/tensor/b/bf16": 0.6,
    }
    second = scalars.of(summary(a=0.9, b=0.2, c=0.95))
    assert {k: v for k, v in second.items() if "tensor" in k} == {
        "halfulp/tensor/b/bf16": 0.2,
        "halfulp/tensor/c/bf16": 0.95,  # the worst comes first; there is no room for a
    }


def test_tags_are_harmless_and_different() -> None:
    names = [
        "a/b",
        "a\\b",
        "a\nb",
        "a\x1b[31mb",
        "\u202ea",
        "x" * 500,
        "x" * 501,
        "",
        " ",
        "../..",
        "lone\udc80",
    ]
    tags = [tag(n) for n in names]
    assert len(set(tags)) == len(names)
    assert all(t and len(t) <= 130 and t.isascii() and t.isprintable() and "/" not in t for t in tags)
    assert [tag(g) for g in ("bf16", "e4m3@128", "int4/g128", "int8/row")] == [
        "bf16", "e4m3@128", "int4-g128", "int8-row",
    ]  # fmt: skip


def recorded(listener: Any, folder: Path) -> hu.Trace:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with hu.Audit(optimizer, ["bf16", "int8/row"], model=model, out=folder, listeners=[listener]) as audit:
        train(model, optimizer, 5, audit=audit)
    return hu.Trace.open(folder)


@pytest.mark.parametrize("given", ["folder", "writer"])
def test_tensorboard(given: str, tmp_path: Path) -> None:
    """What TensorBoard reads is what the trace says, in the single precision that it keeps."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from halfulp.integrations.tensorboard import TensorBoard

    board = tmp_path / "board"
    writer = SummaryWriter(str(board)) if given == "writer" else None
    trace = recorded(TensorBoard(writer or board), tmp_path / "trace")
    found = EventAccumulator(str(board))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert "halfulp/tensor/norm.weight/bf16" in tags
    for name, expected in (
        ("halfulp/frozen/bf16", trace.frozen("bf16")),
        ("halfulp/frozen/int8-row", trace.frozen("int8/row")),
        ("halfulp/never_moved/bf16", trace.never_moved("bf16")),
        ("halfulp/tensor/norm.weight/bf16", trace.frozen("bf16", "norm.weight")),
    ):
        events = found.Scalars(name)
        assert [e.step for e in events] == [1, 2, 3, 4, 5]
        np.testing.assert_array_equal([e.value for e in events], expected.astype(np.float32))
    ratios = [e.value for e in found.Scalars("halfulp/update_ratio")]
    np.testing.assert_allclose(ratios, trace.update_ratio(), rtol=2.0**-23)


class Refusing:
    """Somebody's dashboard that takes two steps, and then nothing."""

    trackers = (1,)

    def __init__(self) -> None:
        self.seen: list[int] = []

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.log({"halfulp/step": step})

    def flush(self) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        found = values["halfulp/step"] if step is None else step
        self.seen.append(found)
        if found > 2:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["tensorboard:TensorBoard", "wandb:WandB", "accelerate:Trackers"])
def test_a_dashboard_that_cannot_be_told_any_more(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, nothing more is tried, and training and audit go on."""
    module, _, name = kind.partition(":")
    theirs = Refusing()
    listener = getattr(importlib.import_module(f"halfulp.integrations.{module}"), name)(theirs)
    trace = recorded(listener, tmp_path / "trace")
    assert trace.steps.tolist() == [1, 2, 3, 4, 5]
    assert list(dict.fromkeys(theirs.seen)) == [1, 2, 3]
    assert theirs.seen.count(3) == 1
    said = capsys.readouterr().err
    assert said.count(f"halfulp: {name} could not be told of step 3 (OSError: [Errno 28] No space") == 1
    assert listener.trouble is not None


def test_a_listener_that_raises_is_dropped_and_the_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listener(_: Any) -> None:
        raise ConnectionError("the logging server is away")

    assert recorded(listener, tmp_path / "trace").steps.tolist() == [1, 2, 3, 4, 5]
    said = capsys.readouterr().err
    assert said.count("raised at step 1 and is not called again (ConnectionError: the logging server") == 1

    def stop(_: Any) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        recorded(stop, tmp_path / "stopped")


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step reaches the run's own file."""
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    from halfulp.integrations.wandb import WandB

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    with pytest.raises(hu.UsageError, match=r"wandb\.init"):
        WandB()
    with wandb.init(project="halfulp", dir=tmp_path) as run:
        trace = recorded(WandB(), tmp_path / "trace")
        file = next(Path(run.dir).parent.glob("*.wandb"))
    logged = history(file)
    assert [int(row["halfulp/step"]) for row in logged] == [1, 2, 3, 4, 5]
    for name, expected in (
        ("halfulp/frozen/bf16", trace.frozen("bf16")),
        ("halfulp/never_moved/int8-row", trace.never_moved("int8/row")),
        ("halfulp/tensor/norm.weight/bf16", trace.frozen("bf16", "norm.weight")),
    ):
        np.testing.assert_array_equal([row[name] for row in logged], expected)


def test_trackers_of_an_accelerator(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from halfulp.integrations.accelerate import Trackers

    with pytest.raises(hu.UsageError, match="init_trackers"):
        Trackers(accelerate.Accelerator(cpu=True))
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("board")
    trace = recorded(Trackers(accelerator), tmp_path / "trace")
    accelerator.end_training()
    found = board(tmp_path / "board")
    for name, expected in (
        ("halfulp/frozen/int8-row", trace.frozen("int8/row")),
        ("halfulp/never_moved/bf16", trace.never_moved("bf16")),
    ):
        assert list(found[name].items()) == list(zip(range(1, 6), single(expected), strict=True))
