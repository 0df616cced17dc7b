"""What the old revision wrote, opened: checkpoints, a run cut short and resumed, state files, a converted folder and its cache.

`write` runs the old revision's command line; `compute` then opens copies of these files, in either revision.
"""

import contextlib
import io
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

A_RUN = "--steps 40 --hidden-size 32 --layers 2 --heads 2 --context 64 --seed 1 --save-every 20"
KINDS = {
    "linear": "--attention linear --decay token",
    "favor": "--attention linear --feature-map favor --map-option favor.num_features=16 --redraw-every 15",
    "mixed": "--attention linear,softmax",
}


def command(*words: str | Path) -> None:
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
    text = text_of(folder)
    draw = random.Random(0)
    text.write_text(" ".join(draw.choice(["one", "two", "three", "and", "four"]) for _ in range(20_000)))
    for kind, options in KINDS.items():
        run = folder / kind
        command("train", text, "--out", run, *A_RUN.split(), *options.split())
        command(
            "generate",
            run,
            *["--prompt", "one", "--max-new-tokens", "3", "--seed", "1", "--state-out"],
            run / "a.state",
        )
    a_llama(folder / "llama", tokenizer_of=folder / "linear")
    few = "--length 128 --num-texts 4 --window 16"
    command("convert", folder / "llama", folder / "converted", "--texts", text, *few.split())
    from tarnn.conversion import constant_cache, save_cache

    model = converted(folder)
    cache = constant_cache(model)
    with torch.no_grad():
        model(some_ids()[:, :50], cache=cache)
    save_cache(folder / "converted.cache", model, cache)


def converted(folder: Path) -> Any:
    import transformers

    import tarnn.conversion  # noqa: F401  (makes converted folders known to transformers)

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "converted").eval()


def some_ids() -> torch.Tensor:
    return torch.randint(3, 250, (1, 200), generator=torch.Generator().manual_seed(0))


def text_of(folder: Path) -> Path:
    """Where both revisions find it: a run is resumed with the words that it began with."""
    return folder.parent / "text.txt"


def a_llama(folder: Path, *, tokenizer_of: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=300, num_hidden_layers=2, max_position_embeddings=512, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)


def compute(number: int, folder: Path) -> dict[str, Any]:
    """`number` tokens are drawn of each."""
    found: dict[str, Any] = {}
    for kind, options in KINDS.items():
        run = folder / kind
        found |= weights(f"{kind} as saved", run)
        found[f"{kind} from its state"] = continued(run, "--state-in", run / "a.state", number=number)
        found[f"{kind} from the beginning"] = continued(run, "--prompt", "two three", number=number)
        cut_back(run)
        command("train", text_of(folder), "--out", run, *A_RUN.split(), *options.split(), "--resume")
        found |= weights(f"{kind} resumed", run)
    from tarnn.conversion import load_cache

    model, ids = converted(folder), some_ids()
    with torch.no_grad():
        found["converted: logits"] = model(ids).logits
    for name, prompt, options in (
        ("text", ids[:, :50], {}),
        ("text from its cache", ids[:, :60], {"cache": load_cache(folder / "converted.cache", model)}),
    ):
        found[f"converted: {name}"] = model.generate(prompt, max_new_tokens=number, do_sample=False, **options)
    return found


def continued(run: Path, *words: str | Path, number: int) -> str:
    return said("generate", run, *words, "--max-new-tokens", str(number), "--seed", "3")


def said(*words: str | Path) -> str:
    """What `tarnn WORDS` writes to stdout."""
    heard = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(heard):
        command(*words)
    heard.seek(0)
    return heard.read()


def weights(name: str, run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {f"{name}: {key}": x for key, x in load_file(run / "model.safetensors").items()}


def cut_back(run: Path) -> None:
    """As if the run had been killed between step 20 and step 40."""
    shutil.rmtree(run / "checkpoints" / "checkpoint-40")
    (run / "model.safetensors").unlink()
