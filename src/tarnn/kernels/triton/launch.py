"""From a call to launches: one table of everything that kernels take, by name, and each kernel picks what it names."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tarnn.kernels.linear import Call, Outputs
from tarnn.kernels.triton import forward_kernels, weights
from tarnn.kernels.triton.arguments import Keys, Projection, Rows, Spec
from tarnn.kernels.triton.configurations import SHARED, Configuration, configuration, stretch
from tarnn.kernels.triton.launch_failures import LaunchError
from tarnn.kernels.triton.schedule import Schedule, of_packed, of_rows

# What tiles are multiplied in, and how. float32: three products of tf32 parts, which has all of its digits. float16: tf32,
# which has its digits, and float32's range: features and sums don't fit into float16.
PRODUCTS = {
    torch.float32: (triton.language.float32, "tf32x3"),
    torch.bfloat16: (triton.language.bfloat16, "ieee"),
    torch.float16: (triton.language.float32, "tf32"),
}
ROWS = 64  # rows per tile in kernels that keep no state
# how the kernels without products are compiled, whatever the widths: so they are few
PLAIN = {"num_warps": 4, "num_stages": 1}
PREFIX = 1024
# what no other path mends: memory is full, what ran before had a fault, or the interpreter of tests found one
_PASSED_ON = (torch.OutOfMemoryError, torch.AcceleratorError, InterpreterError)


@contextlib.contextmanager
def launching(kernel) -> Iterator[None]:
    """LaunchError if it can't be: Triton, ptxas, the C compiler that it calls and the driver each have errors of their own."""
    try:
        yield
    except _PASSED_ON:
        raise
    except Exception as error:
        raise LaunchError(kernel.__name__, error) from error


@cache
def processors(device: torch.device) -> int:
    """How many programs run at once, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """KiB that a block may take."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return SHARED.get(10 * major + minor, min(SHARED.values()))


class Launches:
    """A call's launches. `values` is all that its kernels take, by name."""

    def __init__(self, call: Call, *, backward: bool = False):
        """In a backward pass with decays each item is one chunk: all states before and behind chunks are in memory."""
        self.call = call
        (b, h, t, _), (g, s), e, f = call.q.shape, call.k.shape[1:3], call.v.shape[3], call.num_features
        self.sizes = b, h, t, g, s, f, e
        self.config = config = configuration(
            call.q.dtype,
            f,
            e,
            shared_memory(call.q.device),
            channels=call.has_channels,
            factors=call.weighted or call.log_decay is not None,
            backward=backward,
        )
        item = config.chunk
        if not backward or call.log_decay is None:
            blocks = triton.cdiv(e, config.forward_values)
            programs = call.num_sequences * g * blocks
            longest = max(t, s) if call.cu_seqlens is None else t
            item = stretch(longest, programs, self.processors(), config.chunk)
        self.of_keys = self._schedule(s, item, config)
        self.of_queries = self.of_keys if t == s else self._schedule(t, item, config)
        low, precision = PRODUCTS[call.q.dtype]
        if call.omega is not None and precision == "tf32":  # projected features are float32's, whatever x is
            precision = "tf32x3"
        decay = call.log_decay is not None and (call.weighted or not call.has_channels)
        sizes = {"BE": config.forward_values, "C": config.chunk, "decay": decay, "low": low, "precision": precision}
        self.spec = Spec.of(call, **sizes)
        self.nothing = self.wide(1)  # in the place of what is absent, and is never read
        mask = None if call.key_mask is None else call.key_mask.contiguous().view(torch.uint8)
        absent = ("w", "d", "scale_q", "scale_k", "M_in", "M_out", "M_end", "begin", "kept", "S_in", "z_in")
        self.values: dict[str, Any] = dict.fromkeys(absent, self.nothing) | {
            "T": s, "S": s, "B": b, "G": g, "R": h // g, "H": h, "F": f, "E": e, "spec": self.spec, "eps": call.eps,
            "q": Rows.read(call.q), "k": Rows.read(call.k), "v": Rows.read(call.v),
            "projection": Projection.of(call, self.nothing),
            "mask": self.nothing if mask is None else mask, "mask_b": 0 if mask is None else mask.stride(0),
            "num_warps": config.warps, "num_stages": config.stages,
        }  # fmt: skip
        self._scales()
        self._weights()
        decays = Rows(self.nothing) if call.log_decay is None or not call.has_channels else Rows.read(call.log_decay)
        made = (self.values[name] for name in ("scale_k", "w", "d", "M_in", "M_out"))
        self.values["keys"] = Keys(self.values["k"], decays, *made)

    def _schedule(self, length: int, item: int, config: Configuration) -> Schedule:
        call = self.call
        cuts = call.cuts()
        if cuts is None:
            return of_rows(call.q.shape[0], length, item, config.chunk, call.q.device)
        return of_packed(cuts, item, config.chunk, call.q.device)

    def named(self, kernel, more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a kernel names, and how it is compiled."""
        values = {**self.values, **more}
        options = {name: values[name] for name in ("num_warps", "num_stages")}
        return {name: values[name] for name in kernel.arg_names}, options

    def run(self, kernel, grid: tuple[int, ...], **more) -> None:
        """Launches a kernel with what it names; nothing where nobody has anything to do."""
        if 0 not in grid:
            named, options = self.named(kernel, more)
            with launching(kernel):
                kernel[grid](**named, **options)

    def processors(self) -> int:
        return processors(self.call.q.device)

    def wide(self, *shape: int) -> Tensor:
        return self.call.q.new_empty(shape, dtype=torch.float32)

    def _scales(self) -> None:
        """Of exp: each row's largest exponent."""
        if self.call.function != "exp":
            return
        b, h, t, g, s, f, _ = self.sizes
        # two tiles of 64 × 256 are more than Blackwell's tensor memory holds
        rows = ROWS if f <= 128 else ROWS // 2
        spec = self.spec._replace(C=rows, BE=0)  # the same kernel for both passes
        for name, heads, length in (("q", h, t), ("k", g, s)):
            scale = self.values[f"scale_{name}"] = self.wide(b, heads, length)
            grid, x = (triton.cdiv(length, rows), heads, b), self.values[name]
            self.run(weights.row_scales, grid, x=x, scale=scale, T=length, H=heads, R=heads // g, spec=spec)

    def _weights(self) -> None:
        """Log-weights and decays of keys, and the running maximum by chunks."""
        values, call, plan, spec = self.values, self.call, self.of_keys, self.spec
        if not spec.factored:
            return
        b, _, _, g, s, *_ = self.sizes
        n, chunks = call.num_sequences, plan.num_chunks
        values |= {"w": self.wide(b, g, s), "d": self.wide(b, g, s)}
        top, total = self.wide(chunks, g), self.wide(chunks, g)
        spec = spec._replace(BE=0)
        given = (("decay", call.log_decay), ("log_weight", call.key_log_weight))
        tensors = [(Rows(self.nothing) if x is None else Rows.read(x)).named(name) for name, x in given]
        self.run(
            weights.chunk_weights,
            (chunks, g),
            top=top,
            total=total,
            chunks=plan.chunks,
            **tensors[0],
            **tensors[1],
            GIVEN=call.key_log_weight is not None,
            spec=spec,
            **PLAIN,
        )
        if not spec.weighted:
            return
        values |= {"M_in": self.wide(chunks, g), "M_out": self.wide(chunks, g)}
        values |= {"M_end": self.wide(n, g), "begin": self.wide(n, g)}
        self.run(
            weights.running_maximum,
            (n, g),
            top=top,
            total=total,
            M=self.nothing if call.M is None else call.M.contiguous(),
            sequences=plan.sequences,
            B=ROWS,
            GIVEN=call.M is not None,
            FRESH=call.S is None,
            spec=spec,
            **PLAIN,
        )

    def state(self) -> dict[str, Any]:
        """What the state before is, as kernels take it."""
        S, z = self.call.S, self.call.z
        if S is None or z is None:
            return {"S_in": self.nothing, "z_in": self.nothing, "GIVEN": 0}
        return {"S_in": S.contiguous(), "z_in": z.contiguous(), "GIVEN": 1}

    def prefix(
        self,
        plan: Schedule,
        sums: tuple[Tensor, Tensor],
        before: tuple[Tensor | None, Tensor | None],
        after: tuple[Tensor, Tensor],
        kept: Tensor | None,
        *,
        scaled: bool = False,
        reverse: bool = False,
    ) -> None:
        """S and z of items become those before them (in reverse: behind), and `after` the totals."""
        n, g, f = self.call.num_sequences, *self.sizes[3:6:2]
        for x, start, total in zip(sums, before, after):
            width = x[0, 0].numel() // f if x.numel() else total[0, 0].numel() // f
            self.run(
                forward_kernels.prefix,
                (n, g, triton.cdiv(f * width, PREFIX)),
                sums=x,
                after=total,
                before=total if start is None else start,
                kept=total if kept is None else kept,
                sequences=plan.sequences,
                E=width,
                B=PREFIX,
                KEPT=kept is not None,
                GIVEN=int(start is not None),
                SCALED=scaled,
                REVERSE=int(reverse),
                **PLAIN,
            )

    def states_before(self, after: tuple[Tensor, Tensor]) -> tuple[dict[str, Any], Tensor | None]:
        """S and z before each item; `after` becomes the state behind all. And what each item keeps of a state."""
        plan, (_, _, _, g, _, f, e) = self.of_keys, self.sizes
        S, z = self.wide(plan.num_items, g, f, e), self.wide(plan.num_items, g, f)
        kept = self.wide(plan.num_items, g, f) if self.spec.weighing else None
        self.run(
            forward_kernels.state_sums,
            (plan.num_items, g, triton.cdiv(e, self.spec.BE)),
            items=plan.items,
            S=S,
            z=z,
            kept=z if kept is None else kept,
        )
        before = self.state()
        start = (before["S_in"], before["z_in"]) if before["GIVEN"] else (None, None)
        self.prefix(plan, (S, z), start, after, kept, scaled=self.spec.weighted and not self.call.causal)
        return {"S_in": S, "z_in": z, "GIVEN": 1}, kept


def forward(call: Call, for_backward: bool, make: type[Launches] = Launches) -> Outputs:
    launches, outputs = make(call), call.new_outputs(den=for_backward)
    plan, (_, h, t, _, _, _, e), values = launches.of_queries, launches.sizes, launches.values
    alone = call.causal and plan.whole
    before = launches.state() if alone else launches.states_before((outputs.S, outputs.z))[0]
    if not call.causal:
        before |= {"S_in": outputs.S, "z_in": outputs.z}
    launches.run(
        forward_kernels.outputs,
        (plan.num_items, h, triton.cdiv(e, launches.spec.BE)),
        items=plan.items,
        o=Rows.of(outputs.o),
        den=launches.nothing if outputs.den is None else outputs.den,
        S_out=outputs.S,
        z_out=outputs.z,
        T=t,
        KEEP_STATE=int(alone),
        KEEP_DEN=int(for_backward),
        **before,
    )
    M = values["M_end"] if call.weighted else outputs.M.zero_()
    return outputs._replace(M=M)
