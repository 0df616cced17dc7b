"""Drawn calls of short convolution, each judged against its definition in float64."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tarnn import ConvolutionState, short_convolution
from tarnn.ops.convolution.definition import convolution

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class Drawn:
    """A call, whatever its options are: x (b, t, c) in one of several layouts."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    key_mask: Tensor | None
    cuts: list[int] | None
    causal: bool
    activation: str | None

    def inputs(self) -> dict[str, Tensor]:
        """The tensors that have gradients."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias, "state": self.state}
        return {name: x for name, x in named.items() if x is not None}

    def ours(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """o, and of a causal call the state behind it."""
        x, weight, bias, state = (inputs.get(name) for name in ("x", "weight", "bias", "state"))
        options = {"causal": self.causal, "activation": self.activation, "key_mask": self.key_mask}
        options["cu_seqlens"] = None if self.cuts is None else torch.tensor(self.cuts)
        if not self.causal:
            return (short_convolution(x, weight, bias, **options),)
        before = None if state is None else ConvolutionState(state)
        o, after = short_convolution(x, weight, bias, state=before, return_state=True, **options)
        return o, after.tokens

    def defined(self, dtype: torch.dtype, **inputs: Tensor) -> tuple[Tensor, ...]:
        """The same by the definition, in this dtype, sequence by sequence."""
        x, weight, bias, state = (
            None if (y := inputs.get(name)) is None else y.to(dtype) for name in ("x", "weight", "bias", "state")
        )
        options = {"causal": self.causal, "activation": self.activation}
        if self.cuts is None:
            found = [convolution(x, weight, bias, key_mask=self.key_mask, state=state, **options)]
        else:
            found = []
            for i, (start, stop) in enumerate(zip(self.cuts, self.cuts[1:])):
                mask = None if self.key_mask is None else self.key_mask[:, start:stop]
                before = None if state is None else state[i : i + 1]
                found.append(convolution(x[:, start:stop], weight, bias, key_mask=mask, state=before, **options))
        o = torch.cat([o for o, _ in found], 0 if self.cuts is None else 1)
        return (o, torch.cat([after for _, after in found])) if self.causal else (o,)


def draw(seed: int) -> Drawn:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, packed = choose.choice(DTYPES), choose.random() < 0.3
    b, t = 1 if packed else choose.choice((0, 1, 1, 2, 3)), choose.choice((0, 1, 2, 3, 5, 8, 13, 21, 40))
    c, width = choose.choice((1, 3, 5, 16, 17, 33, 70)), choose.choice((1, 2, 3, 4, 4, 4, 5, 7, 16, 31))
    causal = choose.random() < 0.7
    cuts = sorted([0, t, *(choose.randint(0, t) for _ in range(choose.randint(0, 4)))]) if packed else None
    narrow = dtype if choose.random() < 0.5 else torch.float32

    def numbers(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of)

    x = choose.choice(
        (
            lambda: numbers(b, t, c),
            lambda: numbers(b, c, t).transpose(1, 2),
            lambda: numbers(b, t, 3 * c)[..., c : 2 * c],
            lambda: numbers(b, 2 * t, c, 2)[:, ::2, :, 0],
            lambda: numbers(b, 1, c).expand(b, t, c),
        )
    )()
    rows = b if cuts is None else len(cuts) - 1
    state = numbers(rows, width - 1, c) if causal and choose.random() < 0.5 else None
    if state is not None and choose.random() < 0.5:
        state = state.mT.contiguous().mT
    key_mask = torch.rand(b, t, generator=generator) < choose.choice((0.0, 0.5, 0.9)) if choose.random() < 0.4 else None
    bias = numbers(c, of=narrow) if choose.random() < 0.6 else None
    return Drawn(
        x, numbers(c, width, of=narrow), bias, state, key_mask, cuts, causal, "silu" if choose.random() < 0.5 else None
    )


def results(compute, inputs: dict[str, Tensor], sent: list[Tensor]) -> list[Tensor]:
    """What it gives, and its gradients, if `sent` comes back to it."""
    given = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = compute(**given)
    loss = sum((y.double() * g).sum() for y, g in zip(outputs, sent))
    loss = loss + sum(0.0 * x.double().sum() for x in given.values())  # of no tokens, outputs depend on nothing
    gradients = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, given.values()))]


def wrong(seed: int) -> str:
    """What is wrong with a drawn call, "" if nothing is: each result errs at most twice as much as a naive implementation in
    the dtype of the inputs, and two roundings (of the largest of its kind, for a naive result may be exact by luck)."""
    drawn = draw(seed)
    inputs, dtype = drawn.inputs(), drawn.x.dtype
    generator = torch.Generator().manual_seed(seed)
    sent = [
        torch.randn(y.shape, generator=generator).to(dtype).double() for y in drawn.defined(torch.float64, **inputs)
    ]
    mine = results(drawn.ours, inputs, sent)
    exact = results(lambda **xs: drawn.defined(torch.float64, **xs), inputs, sent)
    naive = results(lambda **xs: drawn.defined(dtype, **xs), inputs, sent)
    names = [*("o", "behind")[: len(sent)], *(f"gradient of {name}" for name in inputs)]
    for name, x, y, plain in zip(names, mine, exact, naive):
        if x.shape != y.shape:
            return f"{name}: {tuple(x.shape)}, not {tuple(y.shape)}"
        if not y.numel():
            continue
        kind = exact[: len(sent)] if name in ("o", "behind") else exact[len(sent) :]
        scale = max(z.abs().max().item() for z in kind if z.numel())
        error, theirs = ((z.double() - y).abs().max().item() for z in (x, plain))
        added = (
            drawn.x[..., 0].numel() ** 0.5 / 2 if "weight" in name or "bias" in name else 0.0
        )  # one token after the other
        allowed = 2 * theirs + (2 + added) * torch.finfo(x.dtype).eps * max(scale, 1.0)
        if dtype == torch.float64:  # in which what is exact was computed, too
            allowed = 1e-12 * max(scale, 1.0)
        if not error <= allowed:
            return f"{name}: error {error:.2g}, at most {allowed:.2g} ({drawn.x.shape}, {dtype})"
    return ""
