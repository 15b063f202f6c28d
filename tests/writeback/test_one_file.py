"""States in files: what is not one, what is damaged, and saves that fail."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from writeback_models import Tied, train, written_back
from writeback_unchanged import assert_unchanged, everything

import halfulp as hu
from halfulp.writeback import load, save

GRID = "e4m3@16"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[hu.WriteBack, torch.nn.Module, Path]:
    model = Tied()
    opt = written_back(model, GRID, "kahan")
    train(model, opt, 2)
    save(opt, tmp_path / "state.safetensors")
    return opt, model, tmp_path / "state.safetensors"


Saved = tuple[hu.WriteBack, torch.nn.Module, Path]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_a_truncated_file(saved: Saved, share: float) -> None:
    opt, model, path = saved
    before, content = everything(model, opt), path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(hu.CorruptionError, match=str(path)):
        load(opt, path)
    assert_unchanged(before, model, opt)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"halfulp": "null"},
        {"halfulp": "{"},
        {"halfulp": "[]"},
        {"halfulp": "{}"},
        {"halfulp": '{"state": 1}'},
    ],
)
def test_another_safetensors_file(saved: Saved, metadata: dict[str, str] | None) -> None:
    opt, model, path = saved
    before = everything(model, opt)
    save_file({"0/x": torch.ones(3)}, path, metadata=metadata)
    with pytest.raises(hu.CorruptionError, match=f"{path} is.*not a state that halfulp.writeback.save wrote"):
        load(opt, path)
    assert_unchanged(before, model, opt)


def test_a_file_that_is_not_there(saved: Saved) -> None:
    opt, _, path = saved
    with pytest.raises(hu.CorruptionError, match=r"nothing.safetensors"):
        load(opt, path.with_name("nothing.safetensors"))


def test_a_failed_save_leaves_the_old_file(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written aside and renamed: a crash in between costs the new state, not the old one."""
    opt, model, path = saved
    content, weights = path.read_bytes(), copy.deepcopy(model.state_dict())
    train(model, opt, 1, start=2)

    def crash(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(hu.HalfulpError, match="the disk is full") as caught:
            save(opt, path)
    assert caught.value.exit_code == 4
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]
    model.load_state_dict(weights)
    load(written_back(model, GRID, "kahan"), path)


def test_a_state_that_json_cannot_hold(tmp_path: Path) -> None:
    """LBFGS keeps lists of tensors; torch.save takes them."""
    model = Tied()
    opt = hu.WriteBack(torch.optim.LBFGS(model.parameters(), max_iter=4), GRID, "rne", model=model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(torch.zeros(1, 3, dtype=torch.long)).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    with pytest.raises(hu.UsageError, match="JSON cannot hold"):
        save(opt, tmp_path / "state.safetensors")
    assert list(tmp_path.iterdir()) == []
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    opt.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
