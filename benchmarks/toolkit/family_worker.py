"""One contender of `families.py`: a training step of a linear model of transformers, with tarnn's ops or without.

    PYTHONPATH=CHECKOUT/src python benchmarks/toolkit/family_worker.py '{"case": {…}, "method": "tarnn", "threads": 2}'

It prints a line about the model and its memory after the second step. Each line that it then reads asks for one more step, which
it answers by its milliseconds and its loss.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import tarnn
from scripts.common.memory import peak_bytes

METHODS = {"transformers": (), "tarnn": (tarnn.patch_transformers,)}
METHODS["tarnn, and its products"] = (*METHODS["tarnn"], tarnn.fast_matmul)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    transformers.logging.set_verbosity_error()
    with ExitStack() as stack:
        for method in METHODS[given["method"]]:
            stack.enter_context(method())
        model = make_model(given["case"])
        step = training_step(model, given["case"])
        step()
        peak = peak_bytes(step)
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        parameters = sum(x.numel() for x in model.parameters())
        tell({"parameters": parameters, "peak_bytes": peak, "process_bytes": whole})
        for _ in sys.stdin:
            begun = time.perf_counter()
            loss = step()
            tell({"ms": 1000 * (time.perf_counter() - begun), "loss": loss})


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def make_model(case: dict[str, Any]) -> nn.Module:
    """Qwen3.5's text model with random weights; of `lora` there are adapters beside frozen weights."""
    torch.manual_seed(0)
    before, dtype = torch.get_default_dtype(), getattr(torch, case["dtype"])
    torch.set_default_dtype(dtype)
    try:
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**case["config"]))
    finally:
        torch.set_default_dtype(before)
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        model.activation_checkpointing_enable()
        model.enable_input_require_grads()
        names = ["in_proj_qkv", "out_proj", "q_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=names))
    return model.train()


def training_step(model: nn.Module, case: dict[str, Any]) -> Callable[[], float]:
    """Forward, loss, backward, AdamW."""
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], 1e-4)
    shape, vocabulary = (case["batch"], case["tokens"]), case["config"]["vocab_size"]
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
