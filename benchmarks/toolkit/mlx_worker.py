"""mlx-lm's trainer as a contender of `finetune.py`, in an environment of its own: mlx, mlx-cpu and mlx-lm, no tarnn.

    ENVIRONMENT/bin/python benchmarks/toolkit/mlx_worker.py '{"folder": …, "rows": [[[3, 5, 7], 1]], "rank": 16, …}'

It prints what `finetune_worker.py` prints. A thread count is not its to choose: mlx takes as many as its BLAS does.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from mlx.optimizers import AdamW
from mlx.utils import tree_flatten
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

KEYS = {
    "linear_attn": ("in_proj_qkv", "in_proj_z", "out_proj"),
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
ANSWERS, sys.stdout = sys.stdout, sys.stderr  # the trainer writes, too


def tell(**what) -> None:
    print(json.dumps(what), file=ANSWERS, flush=True)


class InTurns(TrainingCallback):
    """Say how long each step took, and wait for a line before the next."""

    def on_train_loss_report(self, info):
        tell(ms=1000 / info["iterations_per_second"], loss=info["train_loss"])
        if not sys.stdin.readline():
            raise SystemExit


def main() -> None:
    given = json.loads(sys.argv[1])
    tell(version=version("mlx-lm"))
    model, _ = load_model(Path(given["folder"]), model_config={"model_type": "qwen3_5", "architectures": []})
    model.freeze()
    adapters = {"rank": given["rank"], "scale": 2.0, "dropout": 0.0}
    adapters["keys"] = [f"{part}.{name}" for part, names in KEYS.items() for name in names]
    linear_to_lora_layers(model, len(model.layers), adapters)
    tell(trained=sum(x.size for _, x in tree_flatten(model.trainable_parameters())))
    rows = [(ids, skip) for ids, skip in given["rows"]]
    args = TrainingArgs(
        batch_size=len(rows),
        iters=1000,
        steps_per_report=1,
        steps_per_save=10**9,
        max_seq_length=max(len(ids) for ids, _ in rows),
        adapter_file=str(Path(given["out"]) / "adapters.safetensors"),
        grad_checkpoint=True,
    )
    train(model, AdamW(learning_rate=2e-4), rows, args=args, training_callback=InTurns())


if __name__ == "__main__":
    main()
