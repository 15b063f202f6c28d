"""What a write-back costs where tensors are many and small, and in a small training: ratios in one run.

Two tables. *Many*: 10,000 tensors of 4 x 4 (``--tensors``), where a step is as long as what is done for each
tensor, beside torch's own step of the same optimizer. *Training*: a Llama of 30 tensors in bfloat16 under
Hugging Face's ``Trainer``, whole steps with forward and backward, beside the same run with the plain
optimizer; left out where ``transformers`` is not installed. Every contestant steps (or trains) once in each
repetition, in shuffled order; the result is the median. ``hooks``: how often a hook of all optimizers fires.

    python benchmarks/many_tensors.py [--json OUT] [--tensors 10000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kernels import OUT, environment
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfulp as hu

RATE = 1e-3
SGD, ADAMW = "torch SGD", "torch AdamW, fused"
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def back(kind: Any, **options: Any) -> Make:
    """A write-back around one of torch's, with its defaults."""
    return lambda m: hu.WriteBack(kind(m.parameters(), lr=RATE, **options), "bf16", "sr", model=m)


def plain(kind: Any, **options: Any) -> Make:
    return lambda m: kind(m.parameters(), lr=RATE, **options)


MANY: dict[str, tuple[Make, str]] = {
    SGD: (plain(torch.optim.SGD), SGD),
    "torch SGD, foreach": (plain(torch.optim.SGD, foreach=True), SGD),
    "WriteBack(SGD)": (back(torch.optim.SGD), SGD),
    ADAMW: (plain(torch.optim.AdamW, fused=True), ADAMW),
    "torch AdamW, foreach": (plain(torch.optim.AdamW, foreach=True), ADAMW),
    "WriteBack(AdamW, fused)": (back(torch.optim.AdamW, fused=True), ADAMW),
    "WriteBack(AdamW)": (back(torch.optim.AdamW), ADAMW),
    "hu.AdamW": (lambda m: hu.AdamW(m.parameters(), lr=RATE, model=m), ADAMW),
}
"""Contestants, and beside whom each is set."""
TRAINING: dict[str, Make] = {
    "torch AdamW": plain(torch.optim.AdamW),
    "WriteBack(AdamW)": back(torch.optim.AdamW),
    "WriteBack(AdamW, fused)": back(torch.optim.AdamW, fused=True),
}


@contextmanager
def counted() -> Iterator[list[None]]:
    """How often a hook of all optimizers fires."""
    found: list[None] = []
    handle = register_optimizer_step_pre_hook(lambda *_: found.append(None))
    try:
        yield found
    finally:
        handle.remove()


def tensors(count: int) -> torch.nn.ParameterList:
    made = torch.Generator().manual_seed(0)
    params = torch.nn.ParameterList(torch.randn(4, 4, generator=made) for _ in range(count))
    for p in params:
        p.grad = torch.randn(4, 4, generator=made) * 1e-2
    return params


def many(count: int, repetitions: int) -> list[dict[str, Any]]:
    """Seconds a step of each contestant, and the ratio to torch's own."""
    ready = {name: make(tensors(count)) for name, (make, _) in MANY.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    hooks = {}
    for name, optimizer in ready.items():
        optimizer.step()
        with counted() as found:
            optimizer.step()
        hooks[name] = len(found)
    order = random.Random(0)
    for _ in range(repetitions):
        for name in order.sample(list(ready), len(ready)):
            start = time.perf_counter()
            ready[name].step()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return [
        {"contestant": n, "seconds": median[n], "ratio": median[n] / median[MANY[n][1]], "hooks": hooks[n]}
        for n in ready
    ]


def trainer() -> Callable[[Make, int], float]:
    """A function of an optimizer and a number of steps: seconds a step of a small run."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

    made = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 512, (64,), generator=made) for _ in range(256)]
    data: Any = [{"input_ids": x, "labels": x} for x in batches]
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip

    def run(make: Make, steps: int) -> float:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).bfloat16()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=4, report_to=[],
                disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=True,
                lr_scheduler_type="constant",
            )  # fmt: skip
            training = Trainer(
                model=model, args=arguments, train_dataset=data, optimizers=(make(model), None)
            )
            training.remove_callback(PrinterCallback)
            start = time.perf_counter()
            training.train()
            return (time.perf_counter() - start) / steps

    return run


def trained(repetitions: int, steps: int) -> list[dict[str, Any]]:
    """Seconds a step of each run, and what it costs beside the plain one."""
    run = trainer()
    seconds: dict[str, list[float]] = {name: [] for name in TRAINING}
    hooks = {}
    for name, make in TRAINING.items():
        with counted() as found:
            run(make, 3)
        hooks[name] = len(found) / 3
    order = random.Random(0)
    for _ in range(repetitions):
        for name in order.sample(list(TRAINING), len(TRAINING)):
            seconds[name].append(run(TRAINING[name], steps))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    base = next(iter(median.values()))
    return [
        {"contestant": n, "seconds": median[n], "ratio": median[n] / base, "hooks": hooks[n]}
        for n in TRAINING
    ]


def lines(title: str, rows: list[dict[str, Any]], shown: Callable[[float], str], what: str) -> list[str]:
    table = [title, "", f"| contestant | ms | {what} | hooks a step |", "|---|--:|--:|--:|"]
    for row in rows:
        ms, ratio, hooks = row["seconds"] * 1e3, shown(row["ratio"]), row["hooks"]
        table.append(f"| {row['contestant']} | {ms:.1f} | {ratio} | {hooks:g} |")
    return [*table, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=OUT / "many_tensors.json")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="of each training")
    options = parser.parse_args()
    env = environment()
    steps = many(options.tensors, options.repetitions)
    table = lines(
        f"{options.tensors:,} tensors of 4 x 4, milliseconds a step (median).",
        steps,
        "{:.2f}".format,
        "x torch",
    )
    runs: list[dict[str, Any]] = []
    try:
        runs = trained(options.repetitions, options.steps)
    except ImportError as error:
        table += [f"Training: not installed ({error.name}).", ""]
    else:
        title = "A Trainer run of a small Llama in bfloat16, milliseconds a step (median)."
        table += lines(title, runs, lambda ratio: f"{ratio - 1:+.1%}", "beside plain")
    text = "\n".join([*table, "; ".join(f"{key}: {value}" for key, value in env.items()) + ".", ""])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    made = {"environment": env, "many": steps, "training": runs}
    options.json.write_text(json.dumps(made, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
