"""One contender of `finetune.py`: steps that tune a folder with adapters, by tarnn, or by transformers and peft.

    PYTHONPATH=CHECKOUT/src python benchmarks/toolkit/finetune_worker.py '{"folder": …, "method": "tarnn", …}'

It prints two lines about the run, and one about the first step. Each line that it then reads lets the Trainer go on by one step,
whose milliseconds and loss it prints. `tarnn` is what `tarnn finetune` runs; the other is the Trainer of transformers with the
same arguments and adapters, on a batch that is padded to its longest example.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import set_seed

from tarnn.training.arguments import training_arguments
from tarnn.tuning import run
from tarnn.tuning.adapter import with_adapters
from tarnn.tuning.task import TuneSettings, TuneTask

IGNORED = -100
MANY = 1000  # steps of the run, so that what is said of its time has digits


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    transformers.logging.set_verbosity_error()
    settings = TuneSettings(
        sources=(given["data"],),
        out=Path(given["out"]),
        folder=Path(given["folder"]),
        lora=given["rank"],
        length=given["length"],
        steps=MANY,
        batch_size=1,
        gradient_checkpointing=True,
        val_fraction=0.0,
        device="cpu",
    )
    if given["method"] == "tarnn":
        of_tarnn(settings)
    else:
        method = given["method"]
        of_transformers(settings, given["rows"], "float32" if "float32" in method else "auto", "compiled" in method)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class InTurns(TrainerCallback):
    """Let each step but the first wait for a line, and say how long it took."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.register_forward_hook(lambda module, inputs, outputs: self.losses.append(outputs["loss"].detach()))
        tell(trained=sum(x.numel() for x in model.parameters() if x.requires_grad))

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step and not sys.stdin.readline():
            raise SystemExit
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        tell(ms=1000 * (time.perf_counter() - self.begun), loss=self.losses[-1].item())


class TaskInTurns(TuneTask):
    """What `tarnn finetune` trains, with steps that wait."""

    def trainer_options(self, args: Any) -> dict[str, Any]:
        return {"callbacks": [InTurns()]}


def of_tarnn(settings: TuneSettings) -> None:
    """Run the command's own function; what it says before the first step is told, too."""
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if line.split()[0] == "time":
            patterns = r"memory +([\d.]+) GB", r"about ([\d,.]+) min"
            memory, minutes = (float(re.findall(x, "\n".join(lines))[0].replace(",", "")) for x in patterns)
            tell(said_bytes=1e9 * memory, said_seconds=60 * minutes / MANY)

    run.TuneTask = TaskInTurns  # type: ignore[misc]
    run.tune(settings, report, show=False)


def of_transformers(settings: TuneSettings, rows: list[tuple[list[int], int]], dtype: str, compiled: bool) -> None:
    """The Trainer of transformers, as its documentation says. compiled: each layer, as the whole model takes longer."""
    tell()
    args = training_arguments(settings)
    args.max_steps, args.per_device_train_batch_size = MANY, len(rows)
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype)
    set_seed(settings.seed)
    model = with_adapters(model, settings.lora, 2 * settings.lora, str(settings.folder))
    for layer in model.get_base_model().model.layers if compiled else ():
        layer.compile()
    Trainer(model, args, train_dataset=rows, data_collator=padded, callbacks=[InTurns()]).train()


def padded(rows: list[tuple[list[int], int]]) -> dict[str, Any]:
    """A batch, padded on the right to its longest row; the first tokens of each row are not learned."""
    longest = max(len(ids) for ids, _ in rows)
    fill = [longest - len(ids) for ids, _ in rows]
    lists = {
        "input_ids": [ids + [0] * n for (ids, _), n in zip(rows, fill)],
        "attention_mask": [[1] * len(ids) + [0] * n for (ids, _), n in zip(rows, fill)],
        "labels": [[IGNORED] * skip + ids[skip:] + [IGNORED] * n for (ids, skip), n in zip(rows, fill)],
    }
    return {name: torch.tensor(x) for name, x in lists.items()} | {"use_cache": False}


if __name__ == "__main__":
    main()
