"""Whole models over sequences that ranks share, and by one process: outputs, losses, states and gradients of all parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support.rwkv_models import rwkv_model
from tarnn.models.rwkv import RwkvModel
from tarnn.parallel import sequence
from tarnn.parallel.group import alone

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model, and what it reads, made from their seeds on every rank."""

    head: str = "TarnnForCausalLM"
    config: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[int, ...] = (7, 5, 0, 8)
    rows: int = 2
    masked: bool = False
    packed: str = ""  # how documents are told: "cu_seqlens", "position_ids" or "seq_idx"
    labels: bool = True
    prefill: bool = False
    checkpointed: bool = False
    compiled: bool = False

    def build(self) -> nn.Module:
        from tarnn import models

        torch.manual_seed(0)
        sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"pad_token_id": 0} if self.head.endswith("CTC") else {}
        config = models.TarnnConfig(**{**sizes, "initializer_range": 0.3, "num_labels": 3, **dict(self.config)})
        model = getattr(models, self.head)(config).double()
        if self.checkpointed:
            model.activation_checkpointing_enable()
        if self.compiled:
            model.compile(backend="aot_eager")
        return model.train()

    def inputs(self) -> Tensors:
        """All tensors of the whole call, those with a time axis (b, t)."""
        generator = torch.Generator().manual_seed(1)
        b, t = (1 if self.packed else self.rows), sum(self.lengths)
        found = {"input_ids": torch.randint(11, (b, t), generator=generator)}
        if self.masked:
            found["attention_mask"] = (torch.rand(b, t, generator=generator) > 0.2).long()
        if self.labels:
            found["labels"] = torch.randint(3, (b, t), generator=generator)
            found["labels"][:, ::3] = -100
        if self.head.endswith("SequenceClassification"):
            found["labels"] = torch.tensor([1, 2, 0, 1] if self.packed else [1, 2])
        if dict(self.config).get("problem_type"):
            found["labels"] = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        if self.head.endswith("CTC"):
            found["labels"] = torch.tensor([[1, 2, 2], [3, 1, -100]])
        if (width := dict(self.config).get("input_size")) is not None:
            found["input_features"] = torch.randn(b, t, width, generator=generator, dtype=torch.float64)
            del found["input_ids"]
            if self.masked:  # padding ends rows
                found["attention_mask"] = (torch.arange(t) < torch.tensor([[t - 9], [t]])).long()
        cuts = torch.tensor([0, 3, 9, 16, t], dtype=torch.int32)
        number = torch.searchsorted(cuts[1:], torch.arange(t), right=True)
        if self.packed == "position_ids":
            found["position_ids"] = (torch.arange(t) - cuts[number])[None]
        elif self.packed == "seq_idx":
            found["seq_idx"] = number[None]
        elif self.packed:
            found["cu_seqlens"] = cuts
        return found

    @property
    def shared(self) -> tuple[str, ...]:
        """What is the same on all ranks."""
        return ("cu_seqlens", "labels") if self.head.endswith(("CTC", "SequenceClassification")) else ("cu_seqlens",)


def results(case: Model, given: Tensors) -> Tensors:
    model = case.build()
    if case.prefill:
        return _prefilled(model, given)
    out = model(**given)
    logits = out if isinstance(out, Tensor) else out.logits
    loss = out.loss if case.labels else (logits * _weights(logits)).sum()
    loss.backward()
    found = {"logits": logits, "loss": loss} | {
        f"gradient of {name}": x.grad for name, x in model.named_parameters() if x.grad is not None
    }
    return {name: x.detach() for name, x in found.items()}


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)


def _prefilled(model: Any, given: Tensors) -> Tensors:
    """Logits behind a prompt, its state, and logits of a token more."""
    with torch.no_grad():
        state = model.new_state(len(given["input_ids"]), **({} if isinstance(model, RwkvModel) else {"capacity": 64}))
        logits, state = model.prefill(given["input_ids"], state, given.get("attention_mask"))
        with alone():
            more, _ = model.step(logits.argmax(-1), state)
    return {"after logits": logits, "after step": more} | {f"after {name}": x for name, x in state.tensors().items()}


def on_rank(group: Any, rank: int, case: Model) -> Tensors:
    start = sum(case.lengths[:rank])
    whole = case.inputs()
    mine = {name: x if name in case.shared else x.narrow(1, start, case.lengths[rank]) for name, x in whole.items()}
    with sequence(group):
        return results(case, mine)


def by_one(case: Model) -> Tensors:
    return results(case, case.inputs())


def joined(case: Model, parts: list[Tensors]) -> Tensors:
    whole = {}
    for name in parts[0]:
        each = [part[name] for part in parts]
        if name == "logits" and not case.head.endswith("SequenceClassification"):
            whole[name] = torch.cat(each, 1)
        elif name.startswith(("gradient", "loss")):
            whole[name] = torch.stack(each).sum(0)
        else:
            assert all(torch.equal(x, each[0]) for x in each), f"{name} differs between ranks"
            whole[name] = each[0]
    return whole


@dataclass(frozen=True)
class Rwkv(Model):
    """RWKV-7 with drawn weights."""

    labels: bool = False

    def build(self) -> nn.Module:
        return rwkv_model()


def generated(group: Any, rank: int, case: Model, options: dict[str, Any]) -> Tensor:
    """What a rank answers that generates from its stretch of a prompt; with `group` None, from the whole."""
    model, given = case.build().eval(), case.inputs()
    if group is None:
        return model.generate(**given, **options)
    start = sum(case.lengths[:rank])
    with sequence(group):
        return model.generate(
            **{name: x[:, start : start + case.lengths[rank]] for name, x in given.items()}, **options
        )
