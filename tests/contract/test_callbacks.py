"""The contract inside Trainers and as a mark of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfulp.contract import ContractError

pytest_plugins = ["pytester"]


def llama(dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def trainer(model: Any, folder: Path, steps: int, callback: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    ids = torch.arange(8)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, save_steps=2, use_cpu=True, learning_rate=1e-5,
    )  # fmt: skip
    data: Any = [{"input_ids": ids, "labels": ids}] * 16
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])


def test_a_trainer_is_held_to_it_and_so_is_its_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from halfulp.integrations.huggingface import ContractCallback

    sound = ContractCallback(weights="float32", states="float32", arrives=0.99)
    trainer(llama(torch.float32), tmp_path / "a", 2, sound).train()
    assert sound.contract is not None
    assert sound.contract.checked == 1
    again = ContractCallback(weights="float32", states="float32")
    trainer(llama(torch.float32), tmp_path / "a", 4, again).train(resume_from_checkpoint=True)
    assert again.contract is not None
    assert again.contract.checked == 1
    said = capsys.readouterr().err
    assert "halfulp: the precision contract held at 1 checked step: weights=float32" in said
    fix = r"optimizer_cls_and_kwargs=\(hu.AdamW, \{\"lr\": 1e-05"
    with pytest.raises(ContractError, match=rf"updated in bfloat16[^$]*{fix}"):
        trainer(llama(torch.bfloat16), tmp_path / "b", 2, ContractCallback(weights="float32")).train()


@pytest.mark.filterwarnings("default")  # what Lightning says of itself
@pytest.mark.parametrize("library", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_is_held_to_it(library: str, tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip(library)
    from halfulp.integrations import lightning as ours

    callback = ours.ContractCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4).to(dtype)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0].to(self.layer.weight.dtype)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
    options = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1,
        "default_root_dir": tmp_path,
    }  # fmt: skip
    held = callback(weights="float32")
    lightning.Trainer(callbacks=[held], **options).fit(Module(torch.float32), loader)
    assert held.contract.checked == 1
    with pytest.raises(ContractError, match=r"layer\.weight: updated in bfloat16"):
        lightning.Trainer(callbacks=[callback(weights="float32")], **options).fit(
            Module(torch.bfloat16), loader
        )


MARKED = """
import pytest, torch

def step(dtype):
    p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=1e-3).step()

@pytest.mark.halfulp(weights="float32")
def test_sound():
    step(torch.float32)

@pytest.mark.halfulp(weights="float32")
def test_narrow():
    step(torch.bfloat16)

@pytest.mark.halfulp(weights="float32")
def test_nothing():
    pass

@pytest.mark.halfulp(arrives=0.99)
def test_lost():
    step(torch.bfloat16)

@pytest.mark.halfulp(weights="float32")
def test_swallowed():
    try:
        step(torch.bfloat16)
    except Exception:
        pass

@pytest.mark.halfulp("float32")
def test_without_a_name():
    step(torch.float32)

@pytest.mark.halfulp(weights="float32", moving="*nrom*")
def test_pattern():
    step(torch.float32)

def test_unmarked():
    step(torch.bfloat16)
"""


def test_a_marked_test_is_held_to_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_inprocess(
        "-p", "no:halfulp", "-p", "halfulp.integrations.pytest_marker", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=2, failed=6)
    result.stdout.fnmatch_lines(
        ["*updated in bfloat16*", "*no optimizer stepped in it*", "*of the proposed change was written*"],
        consecutive=False,
    )
