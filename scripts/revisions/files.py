"""What the old revision wrote, opened: checkpoints, a run cut short and resumed, a state file, a converted folder.

`write` runs the old revision's command line; `compute` then opens copies of these files, in either revision.
"""

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

A_RUN = "--steps 40 --hidden-size 32 --layers 2 --heads 2 --context 64 --seed 1 --set save_steps=20 --set save_total_limit=5"
KINDS = {
    "linear": "--attention linear --decay token",
    "favor": "--attention linear --feature-map favor --map-option favor.num_features=16 --redraw-every 15",
    "mixed": "--attention linear,softmax",
}  # fmt: skip
STORIES = Path("../shared/data/stories260k")  # converted where it is at hand


def tarnn(*words: str | Path) -> None:
    """`tarnn WORDS`, in this process. Raises SystemExit where the command fails."""
    from tarnn.cli.main import main

    sys.argv = ["tarnn", *map(str, words)]
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code
    if code:
        raise SystemExit(f"tarnn {' '.join(map(str, words))}: {code}")


def write(folder: Path) -> None:
    text = folder / "text.txt"
    draw = random.Random(0)
    text.write_text(" ".join(draw.choice(["one", "two", "three", "and", "four"]) for _ in range(20_000)))
    for kind, options in KINDS.items():
        run = folder / kind
        tarnn("train", text, "--out", run, *A_RUN.split(), *options.split())
        tarnn("generate", run, "--prompt", "one two", "--max-new-tokens", "3", "--seed", "1", "--state-out", run / "a.state")
    if STORIES.exists():
        tarnn("convert", STORIES, folder / "converted", "--texts", text, "--length", "128", "--num-texts", "4", "--window", "16")


def compute(number: int, folder: Path) -> dict[str, Any]:
    """`number` tokens are drawn of each."""
    found: dict[str, Any] = {}
    for kind, options in KINDS.items():
        with_state = folder / f"{kind}.txt"
        run = folder / kind
        found |= weights(f"{kind} as saved", run)
        found[f"{kind} from its state"] = said(run, with_state, "--state-in", run / "a.state", number=number)
        found[f"{kind} from the beginning"] = said(run, with_state, "--prompt", "two three", number=number)
        cut_back(run)
        tarnn("train", folder / "text.txt", "--out", run, *A_RUN.split(), *options.split(), "--resume")
        found |= weights(f"{kind} resumed", run)
    converted = folder / "converted"
    if converted.exists():
        from transformers import AutoModelForCausalLM

        from tarnn.conversion import load

        del AutoModelForCausalLM
        model = load(converted)
        ids = torch.randint(3, 400, (1, 200), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found["converted: logits"] = model(ids).logits
            found["converted: text"] = model.generate(ids[:, :50], max_new_tokens=number, do_sample=False)
    return found


def said(run: Path, out: Path, *words: str | Path, number: int) -> str:
    """What `tarnn generate` writes to a file that is stdout."""
    import contextlib
    import io

    heard = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(heard):
        tarnn("generate", run, *words, "--max-new-tokens", str(number), "--seed", "3")
    heard.seek(0)
    return heard.read()


def weights(name: str, run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {f"{name}: {key}": x for key, x in load_file(run / "model.safetensors").items()}


def cut_back(run: Path) -> None:
    """As if the run had been killed at step 20 … of 40."""
    last = sorted((run / "checkpoints").glob("checkpoint-*"), key=lambda x: int(x.name.split("-")[1]))
    for each in last[1:]:
        shutil.rmtree(each)
    (run / "model.safetensors").unlink()
