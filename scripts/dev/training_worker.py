"""One contender of `training_profile.py`: `tarnn train`, paused after every few steps to time the model's own step and torch.mm.

    PYTHONPATH=CHECKOUT/src python scripts/dev/training_worker.py '{"model": {…}, "steps": 10, …}'

The first line that it prints is about the model. Each line that it then reads asks for a round, which it answers by the median
milliseconds of a step of `tarnn train`, of a step of the model alone, and of torch.mm. Behind the last come the parts.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

import tarnn.training.run as training
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.tasks import TextSettings

MOST_STEPS = 20_000
WARM_UP = 3  # steps


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    rounds, add = Rounds(given), training.add_callbacks

    def add_rounds(trainer, *args) -> None:
        add(trainer, *args)
        trainer.add_callback(rounds)

    with tempfile.TemporaryDirectory() as folder, patch.object(training, "add_callbacks", add_rounds):
        text = Path(folder, "text.txt")
        text.write_bytes(bytes(random.Random(0).choices(range(32, 127), k=100_000)))
        settings = TextSettings(
            (str(text),),
            Path(folder, "run"),
            **given["model"],
            steps=MOST_STEPS,
            save_every=MOST_STEPS,
            val_fraction=0.0,
            sample_tokens=0,
            training_arguments=given["set"],
        )
        training.train(settings, show=False)


class Rounds(TrainerCallback):
    """Times each step of `tarnn train` from its beginning to that of the next, and in its pauses all else."""

    def __init__(self, given: dict):
        self.given, self.times = given, []
        self.begun = self.started = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        now, step = time.perf_counter(), state.global_step
        if step:
            self.times.append(now - self.begun)
        if step == WARM_UP:
            self.model, self.step = make_step(self.given["model"])
            self.matrix = torch.randn(self.given["matrix"], self.given["matrix"])
            seconds_of(self.step, WARM_UP)
            say(facts_of(self.model) | {"first_step_s": self.times[0]})
            self.wait(control)
        elif step > WARM_UP and (step - WARM_UP) % self.given["steps"] == 0:
            others = {"step": (self.step, self.given["steps"] // 2 + 1), "mm": (self.product, 3)}
            found = {name: seconds_of(call, times) for name, (call, times) in others.items()}
            found["train"] = statistics.median(self.times)
            say({name: 1000 * seconds for name, seconds in found.items()})
            self.wait(control)
        self.begun = time.perf_counter()

    def product(self) -> None:
        self.matrix @ self.matrix

    def wait(self, control) -> None:
        """For the next round; the end of stdin is the end."""
        if sys.stdin.readline():
            self.times.clear()
            return
        say(parts(self.step, self.given["profiled"]))
        control.should_training_stop = True


def make_step(model: dict) -> tuple[TarnnForCausalLM, Callable[[], None]]:
    """The model, and a step as `tarnn train` makes it, without the Trainer."""
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=257,
        hidden_size=model["hidden_size"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["heads"],
    )
    net = TarnnForCausalLM(config).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    rows = torch.randint(0, 257, (model["batch_size"], model["context"] + 1))

    def step() -> None:
        logits = net(input_ids=rows[:, :-1], use_cache=False).logits
        cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        net.zero_grad()

    return net, step


def facts_of(model: TarnnForCausalLM) -> dict:
    """in_products: the weights that each token is multiplied with once."""
    linear = (m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return {"parameters": model.num_parameters(), "in_products": sum(linear)}


def seconds_of(call: Callable[[], None], times: int) -> float:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def parts(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Milliseconds per step by operator, as torch.profiler has them.

    The profiler's notes take memory between the tensors of a step. What was kept for reuse would soon be used up, and each
    step would wait for new pages; so there is more of it first.
    """
    del [torch.zeros(1 << 22) for _ in range(24)][:]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
    return {event.key: event.self_cpu_time_total / 1000 / steps for event in seen.key_averages()}


def say(found: dict) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
