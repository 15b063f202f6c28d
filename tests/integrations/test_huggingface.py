"""Audits inside transformers' Trainer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import STATIC, Brute, assert_same_tables, weights
from integrations.trainers import (
    PRICED,
    SPECS,
    assert_priced,
    board,
    lit_model,
    lit_trainer,
    single,
    trainer,
    walked,
)

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.integrations.piloted import ModuleRun, PilotedRun, TrainerRun

# Other people's libraries warn as they like.
pytestmark = pytest.mark.filterwarnings("default")


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
