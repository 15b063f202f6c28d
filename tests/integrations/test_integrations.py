"""Audits inside transformers, Lightning, TensorBoard and W&B, with the libraries themselves."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import STATIC, Brute, assert_same_tables, batches, made, train, weights

import halfulp as hu
from halfulp.audit.rehearsal.as_if import RandomState
from halfulp.errors import UsageError
from halfulp.integrations import piloted
from halfulp.integrations.piloted import ModuleRun, PilotedRun, TrainerRun
from halfulp.integrations.scalars import Scalars, tag
from halfulp.pilots.pilot import Pilot
from halfulp.pilots.prices import Prices

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


# ---- tags ------------------------------------------------------------------------------------------------


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


# ---- TensorBoard and W&B ---------------------------------------------------------------------------------


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


def test_a_listener_of_ones_own_may_raise(tmp_path: Path) -> None:
    def listener(_: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        recorded(listener, tmp_path / "trace")


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


def records(file: Path) -> list[Any]:
    """A W&B run file: a LevelDB log (blocks of 32 KiB, records in pieces) of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # the rest of a block is padding
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data) or kind == 0:
            break  # not written yet
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(whole)
            whole = b""
    return found


def history(file: Path) -> list[dict[str, float]]:
    """The rows of a run, once W&B's own process has written the last record."""
    deadline = time.monotonic() + 300
    while not any(r.WhichOneof("record_type") == "exit" for r in records(file)):
        assert time.monotonic() < deadline, "W&B does not finish its file"
        time.sleep(0.1)
    rows = [r.history.item for r in records(file) if r.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in rows]


# ---- transformers ----------------------------------------------------------------------------------------


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=61, n_positions=16, n_embd=24, n_layer=1, n_head=2, resid_pdrop=0.1,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip


def trainer(
    folder: Path,
    model: Any,
    callbacks: list[Any],
    optimizers: Any = (None, None),
    made_by: Any = None,
    **changed: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(0, 61, (64, 12), generator=batches())
    data = [{"input_ids": row, "labels": row} for row in ids]
    settings = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "linear", "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 1, **changed,
    }  # fmt: skip
    return Trainer(
        model, TrainingArguments(**settings), train_dataset=data, callbacks=callbacks, optimizers=optimizers,
        optimizer_cls_and_kwargs=made_by,
    )  # fmt: skip


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    pytest.importorskip("accelerate", reason="needs accelerate")
    return pytest.importorskip("transformers", reason="needs transformers")


def watcher(brute: Brute) -> Any:
    """A callback that copies weights around every step, for brute force."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.before = weights(kw["model"])
            self.lr = dict.fromkeys(self.before, 1e-3 * ((6 - state.global_step) / 6))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.after = weights(kw["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
            if "loss" in logs:
                brute.step(state.global_step, self.before, self.after, self.lr, logs["loss"])

    return Watcher()


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (hu.AdamW, {"lr": 1e-3, "moments": "bf16"}),
    "SGD": (hu.SGD, {"lr": 1e-2}),
    "Lion": (hu.Lion, {"lr": 1e-4, "policy": "kahan"}),
}


def writing_back(kind: str, *args: Any, **changed: Any) -> Any:
    """A trainer that makes one of halfulp's optimizers, or has a write-back put around its own."""
    run = trainer(*args, made_by=CLASSES.get(kind), **changed)
    if kind == "WriteBack":
        run.create_optimizer()
        run.optimizer = hu.WriteBack(run.optimizer, "bf16", "sr")
    return run


def all_of_it(opt: Any) -> tuple[str, int]:
    """The line of a state, whose digest is over every tensor, and the step."""
    inner = opt if isinstance(opt, hu.WriteBack) else opt.optimizer  # of accelerate's
    return inner.state_dict()["param_groups"][0]["halfulp"], inner.steps


@pytest.mark.parametrize("kind", [*CLASSES, "WriteBack"])
def test_a_trainer_makes_the_optimizer_itself_and_resumes(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    """From bare parameters in two groups; stopped and taken up from its checkpoint, bit for bit."""
    ends = []
    for stop in (None, 3):
        folder = tmp_path / str(stop)
        settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
        run = writing_back(kind, folder, tiny_gpt2().bfloat16(), [], **settings)
        if stop is not None:
            first = writing_back(kind, folder, tiny_gpt2().bfloat16(), [], **settings)
            first.train()
            run.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        else:
            run.train()
        ends.append((weights(run.model), all_of_it(run.optimizer)))
    (a, state), (b, resumed) = ends
    assert state == resumed
    assert state[1] == 6
    assert {name.partition(".")[0] for name, *_ in json.loads(state[0])["parameters"].values()} == {"0", "1"}
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("kind", ["AdamW", "WriteBack"])
def test_a_plain_trainer_run_goes_on_under_a_write_back(
    transformers: Any, kind: str, optim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``resume_from_checkpoint`` of a run that had none: weights and moments are those of the checkpoint."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "optim": optim}
    plain = trainer(tmp_path, tiny_gpt2().bfloat16(), [], **settings)
    plain.train()
    place = tmp_path / "checkpoint-3"
    saved = torch.load(place / "optimizer.pt", weights_only=True)["state"]
    began: list[Any] = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc]  # untyped
        def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            opt = kw["optimizer"].optimizer
            moments = copy.deepcopy(list(opt.optimizer.state.values()))
            began.append((opt, moments, weights(kw["model"])))

    run = writing_back(kind, tmp_path, tiny_gpt2().bfloat16(), [Look()], **settings)
    run.train(resume_from_checkpoint=str(place))
    opt, moments, start = began[0]
    assert "saved without a write-back" in caplog.text
    for mine, theirs in zip(moments, saved.values(), strict=True):
        assert torch.equal(mine["exp_avg"].bfloat16(), theirs["exp_avg"])
        assert mine["exp_avg"].dtype == (torch.bfloat16 if kind == "AdamW" else torch.float32)
        assert mine["step"] == 3
    model = tiny_gpt2().bfloat16()
    model.load_state_dict(type(model).from_pretrained(place, dtype=torch.bfloat16).state_dict())
    for name, value in weights(model).items():
        assert torch.equal(value, start[name]), name
    assert opt.steps == run.state.global_step - 3 == 3
    lost = [torch.equal(value, weights(run.model)[name]) for name, value in start.items()]
    assert not any(lost)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_is_audited_as_by_brute_force(
    transformers: Any, accumulate: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names from the model, the rate of the step, the loss that is logged; the run itself is unchanged."""
    from halfulp.integrations.huggingface import AuditCallback

    changed = {"gradient_accumulation_steps": accumulate}
    plain = tiny_gpt2()
    trainer(tmp_path / "plain", plain, [], **changed).train()
    brute, model = Brute(STATIC), tiny_gpt2()
    audited = trainer(tmp_path / "audited", model, [AuditCallback(STATIC), watcher(brute)], **changed)
    audited.train()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    trace = hu.Trace.open(tmp_path / "audited" / "halfulp")
    brute.assert_equal(trace)
    assert {t["name"] for t in trace.tensors} == {n for n, _ in model.named_parameters()}
    groups = {t["name"]: t["group"] for t in trace.tensors}
    assert groups["transformer.wte.weight"] == "embedding"
    assert groups["transformer.h.0.attn.c_attn.weight"] == "attention"
    assert groups["transformer.h.0.mlp.c_proj.weight"] == "mlp"
    assert groups["transformer.ln_f.weight"] == "norm"
    assert trace.manifest["optimizers"][0]["class"] == "AdamW"
    said = capfd.readouterr().err
    assert "6 steps audited. " in said
    assert f"The trace is in {tmp_path / 'audited' / 'halfulp'}." in said


def test_a_trainer_with_a_write_back(transformers: Any, tmp_path: Path) -> None:
    """Its own grid gives the events that the write-back counts."""
    from transformers import TrainerCallback

    from halfulp.integrations.huggingface import AuditCallback

    model = tiny_gpt2()
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-3), "e4m3@128", "sr", model=model)
    counted = []

    class Counter(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            counted.append(opt.events.frozen)

    callbacks = [AuditCallback(["e4m3@128"], params=lambda n, p: p.dim() >= 2, verdict=False), Counter()]
    trainer(tmp_path, model, callbacks, optimizers=(opt, None)).train()
    trace = hu.Trace.open(tmp_path / "halfulp")
    np.testing.assert_array_equal(trace.frozen("e4m3@128"), counted)
    assert trace.manifest["optimizers"][0]["wraps"] == "AdamW"


def test_a_trainer_that_resumes_goes_on_with_its_trace(transformers: Any, tmp_path: Path) -> None:
    from halfulp.integrations.huggingface import AuditCallback

    saving = {"save_strategy": "steps", "save_steps": 3}

    def run(folder: str, stop: int | None = None, **options: Any) -> None:
        made = trainer(tmp_path / folder, tiny_gpt2(), [AuditCallback(["bf16"], verdict=False)], **saving)
        if stop is not None:
            from transformers import TrainerCallback

            class Stop(TrainerCallback):
                def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
                    if state.global_step == stop:
                        raise KeyboardInterrupt  # no on_train_end

            made.add_callback(Stop())
        made.train(**options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop=5)
    run("stopped", resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    found = hu.Trace.open(tmp_path / "stopped" / "halfulp")
    assert_same_tables(found, hu.Trace.open(tmp_path / "whole" / "halfulp"))
    assert not (tmp_path / "stopped" / "halfulp-2").exists()
    run("whole")  # from the start: another trace
    assert hu.Trace.open(tmp_path / "whole" / "halfulp-2").last_step == 6


def test_optimizers_that_are_not_torchs_are_refused(transformers: Any) -> None:
    from halfulp.integrations.huggingface import _real

    with pytest.raises(hu.UsageError, match="needs a torch optimizer; this trainer has object"):
        _real(object())


def test_groups_of_known_models(transformers: Any) -> None:
    """The rules know the names that models on the hub use."""
    from transformers import AutoModel, AutoModelForCausalLM

    from halfulp.audit.sources.names import model_names
    from halfulp.measures.groups import group_of

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    kinds = {
        "llama": (transformers.LlamaConfig, AutoModelForCausalLM),
        "gpt_neox": (transformers.GPTNeoXConfig, AutoModelForCausalLM),
        "bert": (transformers.BertConfig, AutoModel),
    }
    found: dict[str, list[str]] = {}
    for kind, (config, auto) in kinds.items():
        model = auto.from_config(config(**small, vocab_size=31, pad_token_id=0))
        for p, (name, module) in model_names(model).items():
            found.setdefault(f"{kind}:{group_of(name, p, module)}", []).append(name)
    for kind, groups in (
        ("llama", {"embedding", "attention", "mlp", "norm", "head"}),
        ("gpt_neox", {"embedding", "attention", "mlp", "norm", "head"}),
        ("bert", {"embedding", "attention", "mlp", "norm", "other"}),  # other: the pooler
    ):
        assert {key.split(":")[1] for key in found if key.startswith(kind)} == groups, found
    assert "model.layers.0.mlp.gate_proj.weight" in found["llama:mlp"]
    assert "gpt_neox.layers.0.attention.query_key_value.weight" in found["gpt_neox:attention"]
    assert found["gpt_neox:head"] in (["embed_out.weight"], ["lm_head.weight"])  # by version
    assert "encoder.layer.0.output.dense.weight" in found["bert:mlp"]


# ---- Lightning -------------------------------------------------------------------------------------------


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param, reason=f"needs {request.param}")


def lit_model(pl: Any, brute: Brute | None = None, *, manual: bool = False, fail_at: int = 0) -> Any:
    """The MLP as a Lightning module, which copies weights around every step for brute force."""

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = made("mlp")
            self.automatic_optimization = not manual
            self.taken = 0
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            x = batch[0]
            loss = torch.nn.functional.cross_entropy(self.net(x), (x[:, 0] > 0).long())
            self.losses.append(loss.item())
            if not manual:
                return loss
            for o in self.optimizers():
                o.zero_grad()
            self.manual_backward(loss)
            before = weights(self)
            lr = {n: 0.1 if p.dim() >= 2 else 1e-3 for n, p in self.named_parameters()}
            for o in self.optimizers():
                o.step()
            self.taken += 1
            brute.step(self.taken, before, weights(self), lr, loss.item())
            return None

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
            self.losses.clear() if self.trainer.accumulate_grad_batches == 1 else None
            before, lr = weights(self), optimizer.param_groups[0]["lr"]
            super().optimizer_step(epoch, index, optimizer, closure)
            self.taken += 1
            loss = sum(self.losses) / len(self.losses)
            self.losses.clear()
            if brute is not None:
                brute.step(self.taken, before, weights(self), dict.fromkeys(before, lr), loss)
            if self.taken == fail_at:
                raise RuntimeError("no more batches")

        def configure_optimizers(self) -> Any:
            if manual:
                matrices = [p for p in self.parameters() if p.dim() >= 2]
                rest = [p for p in self.parameters() if p.dim() < 2]
                return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=batches()))
            return torch.utils.data.DataLoader(data, batch_size=8)

    return Lit()


def lit_trainer(pl: Any, folder: Path, callbacks: list[Any], **changed: Any) -> Any:
    settings = {
        "max_steps": 4, "max_epochs": 9, "default_root_dir": str(folder), "accelerator": "cpu",
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": callbacks, **changed,
    }  # fmt: skip
    return pl.Trainer(**settings)


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


# ---- the user's own loggers ------------------------------------------------------------------------------


def board(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard reads below a folder: values by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for place in sorted({file.parent for file in folder.rglob("events.out.tfevents*")}):
        read = EventAccumulator(str(place))
        read.Reload()
        for name in read.Tags()["scalars"]:
            found.setdefault(name, {}).update({e.step: e.value for e in read.Scalars(name)})
    return found


def single(shares: Any) -> list[float]:
    return np.asarray(shares).astype(np.float32).tolist()


def test_a_trainer_reports_to_what_it_reports_to(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the trainer's own TensorBoard, beside its loss; the run is the one without."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from halfulp.integrations.huggingface import AuditCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    plain, model = tiny_gpt2(), tiny_gpt2()
    trainer(tmp_path / "plain", plain, []).train()
    callback = AuditCallback(["bf16", "int8/row"], verdict=False)
    made = trainer(tmp_path / "out", model, [callback], report_to=["tensorboard"], logging_steps=2)
    made.train()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    trace, found = hu.Trace.open(tmp_path / "out" / "halfulp"), board(tmp_path / "board")
    assert list(found["train/loss"]) == [2, 4, 6]
    for name, expected in (
        ("frozen/bf16", trace.frozen("bf16")), ("frozen/int8-row", trace.frozen("int8/row")),
        ("never_moved/bf16", trace.never_moved("bf16")),
        ("tensor/transformer.ln_f.weight/bf16", trace.frozen("bf16", "transformer.ln_f.weight")),
    ):  # fmt: skip
        series = found[f"train/halfulp/{name}"]
        assert list(series) == [2, 4, 6]
        assert list(series.values()) == single(expected[1::2])
    assert [h["step"] for h in made.state.log_history if "halfulp/frozen/bf16" in h] == [2, 4, 6]


@pytest.mark.parametrize(("report", "logged"), [(None, 0), (True, 2), (False, 0)])
def test_a_trainer_that_reports_to_nobody(
    transformers: Any, report: bool | None, logged: int, tmp_path: Path
) -> None:
    from halfulp.integrations.huggingface import AuditCallback

    callback = AuditCallback(["bf16"], verdict=False, report=report, every=3)
    made = trainer(tmp_path, tiny_gpt2(), [callback])
    made.train()  # six steps are logged; two of them, 1 and 4, are audited
    told = [h["step"] for h in made.state.log_history if "halfulp/frozen/bf16" in h]
    assert told == [1, 4][:logged]


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


# ---- as if -----------------------------------------------------------------------------------------------

SPECS = ["e4m3@128", "e5m2:sr"]


def evaluating(made: Any, every: int, data: Any) -> None:
    """Have a trainer evaluate."""
    from transformers.trainer_utils import IntervalStrategy

    made.eval_dataset, made.args.eval_strategy = data, IntervalStrategy.STEPS
    made.args.eval_steps = made.state.eval_steps = every


def test_a_trainer_evaluates_as_if(transformers: Any, tmp_path: Path) -> None:
    """Every evaluation, for every rehearsal: logged beside the real one, recorded, and the run unchanged."""
    from transformers import TrainerCallback

    from halfulp.integrations.huggingface import AuditCallback

    heard: list[str] = []

    class Listener(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            heard.append("evaluate")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            heard.append("batch")

    def run(folder: str, callbacks: list[Any]) -> Any:
        made = trainer(tmp_path / folder, tiny_gpt2(), [*callbacks, Listener()])
        evaluating(made, 3, made.train_dataset[:10])
        made.train()
        return made

    plain, calls = run("plain", []), heard.copy()
    heard.clear()
    made = run("audited", [AuditCallback(["bf16"], rehearse=SPECS, verdict=False)])
    assert heard == calls  # nobody else hears of the others
    for a, b in zip(plain.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(a, b)
    real = {row["step"]: row["eval_loss"] for row in made.state.log_history if "eval_loss" in row}
    assert real == {row["step"]: row["eval_loss"] for row in plain.state.log_history if "eval_loss" in row}
    logged = [row for row in made.state.log_history if "eval_loss_as_if/e4m3@128" in row]
    assert [row["step"] for row in logged] == [3, 6]
    trace = hu.Trace.open(tmp_path / "audited" / "halfulp")
    for spec in SPECS:
        losses = trace.forecast(spec).losses.to_polars()
        for step, bound, loss, own in losses.iter_rows():
            tag = f"eval_loss_as_if/{spec}" + ("" if bound == "point" else f"/{bound}")
            assert next(row for row in logged if row["step"] == step)[tag] == loss
            assert own == real[step]
        assert set(losses["bound"]) == {"lower", "point", "upper"}


def test_several_data_sets_are_logged_and_the_first_is_recorded(transformers: Any, tmp_path: Path) -> None:
    from halfulp.integrations.huggingface import AuditCallback

    callback = AuditCallback(["bf16"], rehearse="e5m2", verdict=False)
    made = trainer(tmp_path, tiny_gpt2(), [callback])
    evaluating(made, 6, {"a": made.train_dataset[:8], "b": made.train_dataset[8:20]})
    made.train()
    history = {key: value for row in made.state.log_history for key, value in row.items()}
    assert history["eval_a_loss_as_if/e5m2"] != history["eval_b_loss_as_if/e5m2"]
    (found,) = hu.Trace.open(tmp_path / "halfulp").forecast("e5m2").losses.to_polars()["real"].unique()
    assert found == history["eval_a_loss"]


def validated(pl: Any, **changed: Any) -> Any:
    """The model with a validation of two uneven batches, that logs its loss."""
    model = lit_model(pl)

    class Validated(type(model)):  # type: ignore[misc]
        def validation_step(self, batch: Any, index: int) -> None:
            x = batch[0]
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


# ---- pilots ----------------------------------------------------------------------------------------------

PRICED = ["e4m3@128", "bf16:sr"]


def walked(run: Any, updates: int) -> list[torch.Tensor]:
    """The weights of a run on whole batches, made before that of its trainer."""
    drawn = RandomState()
    for update in range(1, updates + 1):
        run.step(run.batch(update), update)
    drawn.put_back()
    return list(run.model.parameters())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are counted in sequences, so that no plan depends on the machine."""
    monkeypatch.setattr(piloted, "Pilot", functools.partial(Pilot, cost=lambda part: part / 8))


def assert_priced(found: Prices | None, said: str) -> None:
    assert found is not None
    assert sorted(p.spec for p in found.prices) == sorted(PRICED)
    for price in found.prices:
        assert price.seen.twin is not None
        assert price.seen.upper >= price.seen.reference - 1e-3
    assert "What each format costs this run in loss" in said
    assert not found.notes


@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_of_a_trainer_is_what_the_trainer_makes(transformers: Any, tmp_path: Path, parts: int) -> None:
    from halfulp.integrations.huggingface import _again, _real

    found = []

    class Before(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            found.extend(walked(TrainerRun(made, _real(optimizer), _again), 6))

    made = trainer(tmp_path, tiny_gpt2(), [Before()], gradient_accumulation_steps=parts)
    made.train()
    for a, b in zip(found, made.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("counted")
def test_a_trainer_prices_formats_and_runs_as_without(
    transformers: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from halfulp.integrations.huggingface import AuditCallback

    def run(folder: str, callbacks: list[Any], resume: Any = None, **options: Any) -> Any:
        made = trainer(tmp_path / folder, tiny_gpt2(), callbacks, **options)
        evaluating(made, 6, made.train_dataset[:10])
        made.train(resume_from_checkpoint=resume)
        return made

    callback = AuditCallback(["bf16"], pilot=PRICED, budget=4.0, verdict=False)
    plain, made = run("plain", []), run("piloted", [callback], save_strategy="steps", save_steps=3)
    for a, b in zip(plain.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_priced(callback.prices, capsys.readouterr().err)
    assert callback.prices is not None
    losses = [row["eval_loss"] for row in made.state.log_history if "eval_loss" in row]
    assert callback.prices.reference == losses[-1]
    resumed = AuditCallback(["bf16"], pilot=PRICED, budget=4.0, verdict=False)
    run("piloted", [resumed], resume=str(tmp_path / "piloted" / "checkpoint-3"))
    assert "the twins of this run's start are in" in capsys.readouterr().err
    assert resumed.prices is not None
    assert [p.seen.twin for p in resumed.prices.prices] == [p.seen.twin for p in callback.prices.prices]


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


def test_what_has_no_twins_is_said(transformers: Any, tmp_path: Path) -> None:
    from halfulp.integrations.huggingface import AuditCallback

    with pytest.raises(UsageError, match="leave rehearse= out"):
        AuditCallback(["bf16"], pilot=PRICED, rehearse=PRICED)
    with pytest.raises(UsageError, match="one eval_dataset"):
        trainer(tmp_path, tiny_gpt2(), [AuditCallback(["bf16"], pilot=PRICED)]).train()
    piloted = PilotedRun(PRICED, 0.15, {})
    with pytest.raises(UsageError, match="cannot begin at step 3: twins begin where the run did"):
        piloted.before(lambda: None, 6, tmp_path / "none", 3)  # type: ignore[arg-type, return-value]
    by_hand = lit_model(pytest.importorskip("lightning"), manual=True)
    trained = lit_trainer(pytest.importorskip("lightning"), tmp_path, [])
    trained.strategy._lightning_optimizers = []
    with pytest.raises(UsageError, match=r"it has 0 optimizers\. Use `halfulp pilot"):
        ModuleRun.check(trained, by_hand)
