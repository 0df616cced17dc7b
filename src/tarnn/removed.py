"""Names that are gone, until the first release: using one raises an error that says what to write instead.

`REMOVED` is the one table. docs/migration.md shows the same rows.
"""

import sys

# written as a user writes it: a module or a name in one, `tarnn COMMAND`, `tarnn COMMAND --option [value]`, `function(argument=)`
REMOVED = {
    "POST /v1/images/generations": "Draw images by `tarnn generate`, with a model of images.",
    "tarnn.attention.before_token": "Compute RWKV-6 by `tarnn.patch_fla()`.",
    "tarnn.attention.rwkv5": "Use RWKV-7: `tarnn.attention.rwkv7`.",
    "WindowAttention(global_tokens=)": "Take `sinks` for first tokens that all see.",
    "hybrid_attention(global_tokens=)": "Take `sinks` for first tokens that all see, `exact_queries` for queries that see all.",
    "set_options(global_tokens=)": "Take `sinks` for first tokens that all see.",
    "read_images(digits)": "Write scikit-learn's digits as `digits/train.npz`: `images` (n, 8, 8), uint8, and `labels`.",
    "tarnn.generation": "Import `tarnn.decoding`.",
    "fast_matmul(shapes=)": "Leave it out, or give `size`, the multiplications of a typical product.",
    "tarnn.decoding.cuda_graph": "Call `model.step`; no step is recorded in a CUDA graph.",
    "tarnn[triton]": "Install `tarnn[gpu]`.",
    "fastest_step(state=)": "Leave it out: no step is recorded in a CUDA graph.",
    "tarnn.kernels.triton": "Install `tarnn[gpu]`: flash-linear-attention's kernels compute on GPUs; docs/gpu.md.",
    "tarnn.moved": "The table of old places is in `tarnn.removed`.",
    "tarnn finetune --texts": "Write `tarnn finetune --against-softmax FOLDER TEXTS --out OUT`.",
    "tarnn train --sequence-parallel": "Train a model of layers within `tarnn.parallel.sequence`: docs/parallel.md.",
    "tarnn serve --workers": "Start N servers behind a proxy, each with its own `--state-dir`; docs/serving.md has the example.",
    "tarnn.training.products": "Use `tarnn.matmul.fast_matmul`.",
    "tarnn train --task seq2seq": "Train with `examples/pairs.py`; the model is as before.",
    "tarnn train --task token-classification": "Train with `examples/words.py`; the model is as before.",
    "tarnn train --target-field": "Read your pairs in `examples/pairs.py`.",
    "tarnn train --encoder-layers": "Give `encoder_layers` to the config in `examples/pairs.py`.",
    "tarnn train --cross-attention": "Give `cross_attention` to the config in `examples/pairs.py`.",
    "tarnn train --tokens-field": "Read your words in `examples/words.py`.",
    "tarnn train --labels-field": "Read your words in `examples/words.py`.",
    "tarnn eval --target-field": "Measure pairs in `examples/pairs.py`.",
    "tarnn.tasks.pairs": "Train with `examples/pairs.py`.",
    "tarnn.tasks.Seq2SeqTask": "Train with `examples/pairs.py`.",
    "tarnn.tasks.TokenClassificationTask": "Train with `examples/words.py`.",
    "tarnn.training.redraw": "Import `tarnn.training.callbacks`.",
    "tarnn.models.fused": "Import `tarnn.decoding.fused`.",
}


def message(name: str) -> str:
    """Return the sentence of a removed name, or "" for any other."""
    return f"{name} has been removed. {REMOVED[name]}" if name in REMOVED else ""


def message_of_command(arguments: list[str]) -> str:
    """Return the sentence of the first removed command, option or value of one in a command line, or ""."""
    if not arguments:
        return ""
    command = f"tarnn {arguments[0]}"
    words = [part for word in arguments[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    options = [(i, word) for i, word in enumerate(words) if word.startswith("--")]
    with_values = (f"{command} {word} {words[i + 1]}" for i, word in options if i + 1 < len(words))
    names = (command, *(f"{command} {word}" for _, word in options), *with_values)
    return next((message(name) for name in names if name in REMOVED), "")


class _Removed:
    """A finder that raises for removed modules. It is asked first, since an old folder may have left its cache behind."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        if name in REMOVED:
            raise ModuleNotFoundError(message(name))  # without its name: `from tarnn import …` would drop the sentence


def announce() -> None:
    sys.meta_path.insert(0, _Removed)  # type: ignore[arg-type]
