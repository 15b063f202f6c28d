"""Audits inside Lightning's Trainer, of both packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import STATIC, Brute, batches
from integrations.trainers import (
    PRICED,
    SPECS,
    assert_priced,
    board,
    lit_model,
    lit_trainer,
    single,
    walked,
)

import halfulp as hu
from halfulp.audit.script.apart import can_fork
from halfulp.integrations.piloted import ModuleRun

# Other people's libraries warn as they like.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param, reason=f"needs {request.param}")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_is_audited_as_by_brute_force(lightning: Any, accumulate: int, tmp_path: Path) -> None:
    from halfulp.integrations.lightning import AuditCallback

    plain = lit_model(lightning)
    lit_trainer(lightning, tmp_path / "plain", [], accumulate_grad_batches=accumulate).fit(plain)
    brute = Brute(STATIC)
    model = lit_model(lightning, brute)
    callback = AuditCallback(STATIC, verdict=False)
    lit_trainer(lightning, tmp_path / "audited", [callback], accumulate_grad_batches=accumulate).fit(model)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    trace = hu.Trace.open(tmp_path / "audited" / "halfulp")
    brute.assert_equal(trace)
    assert trace.last_step == 4
    assert trace.tensors[0]["name"] == "net.fc1.weight"


def test_lightning_with_two_optimizers_by_hand(lightning: Any, tmp_path: Path) -> None:
    from halfulp.integrations.lightning import AuditCallback

    brute = Brute(STATIC)
    model = lit_model(lightning, brute, manual=True)
    lit_trainer(lightning, tmp_path, [AuditCallback(STATIC, verdict=False)], max_steps=8).fit(model)
    trace = hu.Trace.open(tmp_path / "halfulp")
    brute.assert_equal(trace)
    assert trace.steps.tolist() == [1, 2, 3, 4]


def test_lightning_that_fails_keeps_its_trace(
    lightning: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from halfulp.integrations.lightning import AuditCallback

    model = lit_model(lightning, fail_at=3)
    with pytest.raises(RuntimeError, match="no more batches"):
        lit_trainer(lightning, tmp_path, [AuditCallback(["bf16"])]).fit(model)
    assert hu.Trace.open(tmp_path / "halfulp").last_step == 3
    assert "3 steps audited" in capfd.readouterr().err


def test_lightning_that_resumes_goes_on_with_its_trace(lightning: Any, tmp_path: Path) -> None:
    from halfulp.integrations.lightning import AuditCallback

    def run(folder: str, steps: int, checkpoint: Any = None) -> Any:
        made = lit_trainer(
            lightning, tmp_path / folder, [AuditCallback(["bf16"], verdict=False)], max_steps=steps
        )
        made.fit(lit_model(lightning), ckpt_path=checkpoint)
        return made

    run("whole", 6)
    run("parts", 3).save_checkpoint(tmp_path / "at3.ckpt")
    run("parts", 6, tmp_path / "at3.ckpt")
    found, whole = (
        hu.Trace.open(tmp_path / "parts" / "halfulp"),
        hu.Trace.open(tmp_path / "whole" / "halfulp"),
    )
    assert found.steps.tolist() == whole.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert len(found.parts) == 2
    assert not (tmp_path / "parts" / "halfulp-2").exists()


def test_lightning_reports_to_its_loggers(lightning: Any, tmp_path: Path) -> None:
    """On the axis of what the module itself logs."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from halfulp.integrations.lightning import AuditCallback

    kind = lightning.loggers.TensorBoardLogger

    def run(folder: str, callbacks: list[Any]) -> Any:
        model = lit_model(lightning)
        options = {"log_every_n_steps": 2, "logger": kind(str(tmp_path / folder / "board"))}
        lit_trainer(lightning, tmp_path / folder, callbacks, max_steps=6, **options).fit(model)
        return model

    plain, model = run("plain", []), run("audited", [AuditCallback(["bf16"], verdict=False)])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    trace, found = hu.Trace.open(tmp_path / "audited" / "halfulp"), board(tmp_path / "audited" / "board")
    assert found["halfulp/frozen/bf16"] == dict(
        zip([1, 3, 5], single(trace.frozen("bf16")[1::2]), strict=True)  # Lightning counts from 0
    )
    assert "halfulp/frozen/bf16" not in board(tmp_path / "plain" / "board")
    run("quiet", [AuditCallback(["bf16"], verdict=False, report=False)])
    assert not [t for t in board(tmp_path / "quiet" / "board") if t.startswith("halfulp")]


def validated(pl: Any, **changed: Any) -> Any:
    """The model with a validation of two uneven batches, that logs its loss."""
    model = lit_model(pl)

    class Validated(type(model)):  # type: ignore[misc]
        def validation_step(self, batch: Any, index: int) -> None:
            x = batch[0]
            self.seen = [*getattr(self, "seen", []), index]
            loss = torch.nn.functional.cross_entropy(self.net(x), (x[:, 0] > 0).long())
            scale = changed.get("scale", lambda: 1.0)()
            self.log_dict({"val_loss": loss * scale, "other": loss})

        def val_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.randn(13, 16, generator=batches()))
            return torch.utils.data.DataLoader(data, batch_size=8)

    model.__class__ = Validated
    return model


class Logged:
    """A logger's list of what it was told."""

    @staticmethod
    def of(pl: Any) -> Any:
        place = "lightning.pytorch" if pl.__name__.startswith("lightning") else "pytorch_lightning"
        base = __import__(f"{place}.loggers.logger", fromlist=["Logger"]).Logger

        class Told(base):  # type: ignore[misc, valid-type]
            name, version = "told", "0"

            def __init__(self) -> None:
                super().__init__()
                self.rows: list[tuple[int, dict[str, float]]] = []

            def log_hyperparams(self, *_: Any, **__: Any) -> None:
                pass

            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                self.rows.append((step, dict(metrics)))

        return Told()


def test_lightning_validates_as_if(lightning: Any, tmp_path: Path) -> None:
    from halfulp.integrations.lightning import AuditCallback

    settings = {"val_check_interval": 2, "num_sanity_val_steps": 1}
    plain = validated(lightning)
    first = lit_trainer(lightning, tmp_path / "plain", [], **settings)
    torch.manual_seed(5)
    first.fit(plain)
    drawn = torch.rand(())
    logger, model = Logged.of(lightning), validated(lightning)
    callback = AuditCallback(["bf16"], rehearse=SPECS, verdict=False)
    second = lit_trainer(lightning, tmp_path / "audited", [callback], logger=logger, **settings)
    torch.manual_seed(5)
    second.fit(model)
    assert torch.equal(torch.rand(()), drawn)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert torch.equal(first.callback_metrics["val_loss"], second.callback_metrics["val_loss"])
    rows = {step: row for step, row in logger.rows if "val_loss_as_if/e4m3@128" in row}
    assert list(rows) == [2, 4]
    assert callback.running.trouble is None
    trace = hu.Trace.open(tmp_path / "audited" / "halfulp")
    for spec in SPECS:
        for step, bound, loss, own in trace.forecast(spec).losses.to_polars().iter_rows():
            assert rows[step][f"val_loss_as_if/{spec}" + ("" if bound == "point" else f"/{bound}")] == loss
            assert abs(own - loss) < 1.0
    assert "log" not in model.__dict__
    assert model.seen == plain.seen or not can_fork()


def test_a_validation_that_cannot_be_repeated_is_left_alone(
    lightning: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says so once, the training goes on, and the real losses are recorded."""
    from halfulp.integrations.lightning import AuditCallback

    times = iter(range(1, 100))
    model = validated(lightning, scale=lambda: next(times))
    callback = AuditCallback(["bf16"], rehearse="e5m2", verdict=False)
    lit_trainer(lightning, tmp_path, [callback], val_check_interval=2).fit(model)
    said = capfd.readouterr().err
    assert said.count("could not be evaluated as if") == 1
    trace = hu.Trace.open(tmp_path / "halfulp")
    assert sorted(trace.real_losses()) == [2, 4]
    assert len(trace.forecast("e5m2").losses.to_polars()) == 0


@pytest.mark.usefixtures("counted")
def test_lightning_prices_formats_and_runs_as_without(
    lightning: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from halfulp.integrations.lightning import AuditCallback, ModuleValidation

    settings = {"val_check_interval": 2, "num_sanity_val_steps": 0, "gradient_clip_val": 0.5}
    found: list[torch.Tensor] = []

    class Before(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            run = ModuleRun(trainer, pl_module, lambda t, m: ModuleValidation(t, m, "val_loss", alone=True)())
            found.extend(walked(run, 4))

    plain, model = validated(lightning), validated(lightning)
    torch.manual_seed(5)
    lit_trainer(lightning, tmp_path / "plain", [Before()], **settings).fit(plain)
    callback = AuditCallback(["bf16"], pilot=PRICED, budget=4.0, verdict=False)
    torch.manual_seed(5)
    lit_trainer(lightning, tmp_path / "piloted", [callback], **settings).fit(model)
    for a, b, c in zip(plain.parameters(), model.parameters(), found, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert_priced(callback.prices, capsys.readouterr().err)
