"""Copying a sequence: figure 2 of "Transformers are RNNs" (convergence of softmax, LSH and linear attention).

    python experiments/copy_task.py             # about ten minutes on two cores; killed, it goes on
    python experiments/copy_task.py --quick
    python experiments/copy_task.py --length 128 --hidden 256 --updates 10000       # the paper's length: hours
    python experiments/copy_task.py --methods softmax linear dpfp hedgehog "linear, rotary" "gated delta" DPLR --schedule cosine

A separator, up to 15 random symbols out of 10, the separator again, and the same symbols: at most 32 tokens, where the
paper has 128 (--length 128: minutes are too few for that). The loss is that of the second half, which can be known only
by looking back. As in the paper: 4 layers, 8 heads, batches of 64, RAdam, learning rate 1e-3, after 3,000 updates 1e-4;
it doesn't say how wide its model is. All methods see the same batches from the same weights. --schedule cosine: the rate falls
from 1e-3 to zero over all updates instead. --methods: other maps, positions and attentions, to see which reach softmax's loss.
Every --save-every updates a run leaves a checkpoint in --runs, from which the same command goes on.

Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.1.
"""

import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import experiments.baselines  # noqa: F401  registers the attentions that are not tarnn's own
from scripts.common.options import parse
from scripts.common.plots import BLUE, GREEN, GREY, MOST_LINES, ORANGE, PINK, RED, SKY, label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.models import TarnnConfig, TarnnForCausalLM

SEPARATOR, SYMBOLS = 0, 10
METHODS = {  # the keys of the config, and the style of the line
    "softmax": ({"attention": "softmax"}, RED),
    "softmax, rotary": ({"attention": "softmax", "position": "rotary"}, f"{RED} --"),
    "linear": ({}, BLUE),
    "linear, rotary": ({"position": "rotary"}, f"{BLUE} --"),
    "linear, decay": ({"decay": "token"}, f"{BLUE} :"),
    "dpfp": ({"feature_map": "dpfp"}, SKY),
    "hedgehog": ({"feature_map": "hedgehog"}, PINK),
    "gated delta": ({"attention": "gated_delta", "decay": "token"}, GREEN),
    "DPLR": ({"attention": "baselines.low_rank_delta"}, f"{GREEN} --"),
    "LSH": ({"attention": "baselines.lsh", "attention_options": {"baselines.lsh": {"chunk": 16}}}, ORANGE),
    "window + sinks": (
        {"attention": "baselines.window", "attention_options": {"baselines.window": {"window": 8}}},
        GREY,
    ),
}
FULL = {
    "updates": 4000,
    "drop_at": 3000,
    "every": 50,
    "length": 32,
    "hidden": 64,
    "layers": 4,
    "batch_size": 64,
    "methods": ["linear", "softmax"],
    "schedule": "drop",
    "heads": 8,
    "seed": 0,
    "save_every": 500,
    "runs": Path("runs/copy_task"),
}
QUICK = {"updates": 120, "drop_at": 100, "every": 30, "length": 16, "hidden": 32, "layers": 2, "batch_size": 16}


SAME = (
    "schedule",
    "drop_at",
    "every",
    "length",
    "hidden",
    "layers",
    "batch_size",
    "heads",
    "seed",
)  # of a run that goes on


@dataclass
class Curve:
    """What was measured every so many updates, on the same held-out sequences of the longest kind."""

    update: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # nats a copied symbol
    accuracy: list[float] = field(default_factory=list)  # of copied symbols
    training_loss: list[float] = field(default_factory=list)  # mean since the last time
    seconds: list[float] = field(default_factory=list)  # of training, in processor time a thread


def main() -> int:
    about = {
        "runs": "where checkpoints go",
        "schedule": "of the rate: a drop to a tenth, or a cosine to zero over --updates",
    }
    choices = {"methods": list(METHODS), "schedule": ["drop", "cosine"]}
    options = parse(__file__, __doc__, FULL, QUICK, choices=choices, about=about)
    return run(options, measure, report=report, figure=figure)


def measure(options, curves: dict[str, Curve], keep) -> None:
    for method in options.methods:
        training = Training(method, options)
        curves[method] = training.curve
        training.run(keep)


def draw(generator: torch.Generator, batch_size: int, symbols: int) -> tuple[Tensor, Tensor]:
    """(ids, labels), each (b, 2 · symbols + 2); labels −100 up to the second separator."""
    word = torch.randint(1, SYMBOLS + 1, (batch_size, symbols), generator=generator)
    separator = torch.full((batch_size, 1), SEPARATOR)
    ids = torch.cat([separator, word, separator, word], dim=1)
    labels = ids.clone()
    labels[:, : symbols + 2] = -100
    return ids, labels


def build(method: str, options) -> TarnnForCausalLM:
    torch.manual_seed(options.seed)
    config = TarnnConfig.paper(
        vocab_size=SYMBOLS + 1,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        **METHODS[method][0],
    )
    return TarnnForCausalLM(config)


def rate(update: int, options) -> float:
    """The learning rate of this update."""
    if options.schedule == "cosine":
        return 1e-3 * (1 + math.cos(math.pi * update / options.updates)) / 2
    return 1e-3 if update < options.drop_at else 1e-4


class Training:
    """One method's run, from its checkpoint on if there is one. Each batch has sequences of one length, from 1 to the longest."""

    def __init__(self, method: str, options):
        self.method, self.options, self.longest = method, options, options.length // 2 - 1
        self.model = build(method, options)
        self.optimizer = torch.optim.RAdam(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.update, self.seconds, self.losses, self.curve = 0, 0.0, [], Curve()
        self.path = options.runs / f"{method.replace(', ', '_').replace(' ', '_')}.pt"
        if self.path.exists():
            self._resume()

    def run(self, keep) -> None:
        """Up to `options.updates`; keep() is called at each checkpoint."""
        options, done = self.options, self.update
        held_out = draw(torch.Generator().manual_seed(options.seed + 1), options.batch_size, self.longest)
        while True:
            last = self.update == options.updates
            if self.update > done and (self.update % options.save_every == 0 or last):
                self._save()
                keep()
            if self.update % options.every == 0 or last:
                look(self.model, held_out, self.curve, self.update, self.losses, self.seconds)
                self.losses = []
                loss, accuracy = self.curve.loss[-1], self.curve.accuracy[-1]
                print(f"{self.method:15} update {self.update:5}  loss {loss:.4f}  {accuracy:6.1%}", flush=True)
            if self.update >= options.updates:
                return
            self._one_update()

    def _one_update(self) -> None:
        start = time.process_time()
        symbols = int(torch.randint(1, self.longest + 1, (), generator=self.generator))
        ids, labels = draw(self.generator, self.options.batch_size, symbols)
        self.optimizer.param_groups[0]["lr"] = rate(self.update, self.options)
        loss = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds += (time.process_time() - start) / torch.get_num_threads()
        self.update += 1

    def _settings(self) -> dict:
        of_all = ("updates",) if self.options.schedule == "cosine" else ()
        return {name: getattr(self.options, name) for name in (*SAME, *of_all)}

    def _save(self) -> None:
        """Written before the look at this update, which a resumed run takes anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        kept = {
            "settings": self._settings(),
            "update": self.update,
            "seconds": self.seconds,
            "losses": self.losses,
            "curve": asdict(self.curve),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        torch.save(kept, partial)
        partial.replace(self.path)

    def _resume(self) -> None:
        kept = torch.load(self.path, weights_only=True)
        if kept["settings"] != self._settings():
            raise Unmeasured(
                f"{self.path} is of a run with {kept['settings']}, this one has {self._settings()}: "
                "delete it or take another --runs"
            )
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.generator.set_state(kept["generator"])
        self.update, self.seconds, self.losses = kept["update"], kept["seconds"], kept["losses"]
        self.curve = Curve(**kept["curve"])


@torch.no_grad()
def look(model: TarnnForCausalLM, held_out, curve: Curve, update: int, losses: list[float], seconds: float) -> None:
    ids, labels = held_out
    out = model.eval()(input_ids=ids, labels=labels, use_cache=False)
    model.train()
    counted = labels[:, 1:] != -100
    right = out.logits[:, :-1].argmax(-1)[counted] == ids[:, 1:][counted]
    curve.update.append(update)
    curve.loss.append(out.loss.item())
    curve.accuracy.append(right.float().mean().item())
    curve.training_loss.append(sum(losses) / len(losses) if losses else out.loss.item())
    curve.seconds.append(round(seconds, 2))


def report(options, facts, curves: dict[str, Curve]) -> str:
    longest = options.length // 2 - 1
    rows = [
        [
            method,
            f"{curve.loss[-1]:.4f}",
            f"{curve.accuracy[-1]:.1%}",
            next((f"{u:,}" for u, a in zip(curve.update, curve.accuracy) if a > 0.99), None),
            f"{curve.seconds[-1]:.0f}",
        ]
        for method, curve in curves.items()
    ]
    header = ["attention", "loss, nats per symbol", "symbols right", "updates to 99 %", "processor seconds"]
    drop = f"from update {options.drop_at:,} on 1e-4"
    fall = "falling to zero by a cosine" if options.schedule == "cosine" else drop
    return page(
        f"Copying {longest} symbols",
        f"{options.layers} layers, {options.heads} heads, {options.hidden} wide, batches of {options.batch_size}, "
        f"{options.updates:,} updates (learning rate 1e-3, {fall}), {options.threads} "
        f"threads. Held-out sequences of {longest} symbols; guessing costs ln 10 = 2.303.",
        markdown(header, rows),
        "![loss on held-out sequences against updates, a line per attention](copy_task.png)",
    )


def figure(options, facts, curves: dict[str, Curve]):
    """Draw the first methods that were measured; the table has all."""
    made, (axes,) = panels(1, width=7, height=4.8)
    for method, curve in list(curves.items())[:MOST_LINES]:
        line(axes, zip(curve.update, curve.loss), METHODS[method][1], method, marker="")
    label(axes, "updates", "loss on held-out sequences, nats per symbol", scales="linear log")
    return made


if __name__ == "__main__":
    sys.exit(main())
