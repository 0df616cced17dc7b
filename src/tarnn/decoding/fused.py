"""A fused step for the token loop: the whole model in one call of a compiled kernel, for one token or a prompt.

It computes the same sums in the same order as `model.step`; results agree to float32 rounding. Weights may be kept in fewer bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from tarnn.decoding.caches import check_room, lengths_of, longer, masked, widened
from tarnn.decoding.from_program import default_format
from tarnn.decoding.live import check_numbers, program_of
from tarnn.decoding.packing import pack
from tarnn.decoding.parts import Attention, Mixer
from tarnn.decoding.plan import Plan
from tarnn.decoding.program_step import ProgramStep
from tarnn.decoding.refusal import OldKernels, Refusal
from tarnn.decoding.state_check import check_state, tensors_of
from tarnn.errors import UserError
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.model_step import VERSION, run, version_read
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models.inputs import check_length
from tarnn.models.state import ModelState
from tarnn.numerics import default_eps
from tarnn.ops import KVCache, State as LayerState
from tarnn.program.fusion import Fusion
from tarnn.program.instructions import Program
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import OtherVersion, Runtime, Unavailable, check_kernels, whole
from tarnn.program.tokens import check_tokens, rows_of

State = TypeVar("State", bound=ModelState)
Classes = Mapping[type, Callable[..., Any]]
NO_LIMIT = 2**62
ROWS = 2**10  # tokens that one call of the kernel reads


def refusal(model: nn.Module, classes: Classes | None = None, *, anywhere: bool = False) -> str | None:
    """Why there is no fused step for this model, or None. anywhere: judge it as if its weights were float32 on a CPU."""
    try:
        if classes is None:
            Fusion(checked_program(model, anywhere=anywhere))
        else:
            plan_of(model, classes)
    except (Refusal, ProgramError) as reason:
        return str(reason)
    return None


def checked_program(model: nn.Module, *, anywhere: bool = False) -> Program:
    """Write the program of a model where kernels can run programs. Raises Refusal for each reason why there is no fused step."""
    try:
        program = program_of(model, anywhere=anywhere)
        check_kernels()
    except OtherVersion as error:
        raise OldKernels(str(error)) from error
    except (UserError, Unavailable) as error:
        raise Refusal(str(error).rstrip(".")) from error
    return program


def plan_of(model: nn.Module, classes: Classes | None) -> Plan:
    """The plan of this model. Raises Refusal where there is no fused step; arguments as in `refusal`."""
    check_numbers(model)
    plan = Plan(model, classes)
    if not library.available():
        raise Refusal(f"the compiled kernels can't be used: {library.status().why}")
    if version_read() != VERSION:
        raise OldKernels(
            f"the compiled kernels read plans of version {version_read()}, and this package writes version {VERSION}: compile "
            "them again (make install)"
        )
    return plan


class FusedStep:
    """A copy of a model's weights, packed, with which one call of a kernel computes what `model.step` does.

        step = FusedStep(model, weights="int8")
        parameters, state = step.prefill(prompt_ids, state)  # as model.prefill
        parameters, state = step(token_ids, state)  # as model.step; inplace=True writes into the state

    weights: float32 | bfloat16 | int8 | int4, how the layers' matrices are kept; the sums over them, states and all else are
    float32. None: bfloat16 for a model in bfloat16, else float32, so that no weight is rounded. With int8 and int4, rows of
    activations become bytes too (see `tarnn.kernels.cpu.products`), and the head is bfloat16.
    copy_tokens: False shares the table of embeddings, which stays in the model's type, with a model that is written no more.
    classes: descriptions of modules that don't describe themselves (see `tarnn.decoding.plan`).

    The copy is made here, once, and never follows the model: a step goes on with the weights of its making, whatever
    training, loading or writing does to the model's later. To use those, make another step. Several threads may call a
    step at once, each with a state of its own.

    Raises Refusal, a ValueError, for a model that has no fused step (see `refusal`), and ValueError for an unknown format.
    """

    def __init__(
        self, model: nn.Module, weights: str | None = None, classes: Classes | None = None, *, copy_tokens: bool = True
    ):
        if weights is not None and weights not in FORMATS:
            raise ValueError(f"weights must be one of {', '.join(FORMATS)}; got {weights!r}.")
        self.model: Any = model
        with torch.no_grad():
            try:
                if classes is None:
                    self._by_program(step_of(model, weights, copy_tokens))
                    return
                plan = plan_of(model, classes)
            except (Refusal, ProgramError) as reason:
                raise Refusal(f"there is no fused step for this model: {reason}. Use model.step.") from reason
            self.weights = weights or default_format(plan.head.weight.dtype)
            self.num_outputs = len(plan.head.weight)
            self.attentions = [x.attention for x in plan.layers]
            self.new_row = self._expected = [y for x in self.attentions for y in _states_of(x)]  # on the meta device
            self.program = program_step(model, self.weights, self.new_row, copy_tokens)
            if self.program is not None:
                self._by_program(self.program)
                return
            self.packed_plan, self.packed_weights = pack(plan, self.weights)
            self.hidden, self.scale, self.limit = plan.head.weight.shape[1], plan.scale, plan.limit
            self.tokens = plan.tokens.clone() if copy_tokens else plan.tokens.detach()
            self._narrow = any(x.dtype != torch.float32 for x in model.parameters())
            self.places, self._place_of = self._place_table(plan)
        limit = min(self.limit or NO_LIMIT, NO_LIMIT)
        self._numbers = limit, plan.norm_eps, default_eps(torch.float32), float(self.scale)
        # of the last state its rows, its layers and their tensors; one tuple, so that threads don't mix them
        self._checked: tuple[int, tuple[LayerState, ...], list[Tensor]] = (0, (), [])

    def _by_program(self, step: ProgramStep) -> None:
        self.program, self.weights, self.num_outputs = step, step.runtime.weights, step.runtime.num_outputs
        self.new_row = self._expected = step.expected
        self.packed_plan, self.packed_weights, tables = step.runtime.packed
        self.tokens, self.places = tables[0], tables[1] if len(tables) > 1 else None

    def __call__(
        self, token_ids: Int[Tensor, " b"], state: State, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], State]:
        """One token per row, (b,): (parameters or logits (b, p) float32; the state after it).

        Raises ValueError for anything but whole numbers (b,), for a token that is not in the vocabulary, beyond the
        model's last position, and UnfitState for a state that is not of this model's kind; nothing is written then.
        """
        if self.program is not None:
            return self.program(token_ids, state, inplace=inplace)
        state = self.widened(state if inplace else state.clone())
        ids = whole(token_ids)
        tensors = self._check_room(state, len(ids), 1)
        parameters = torch.empty(len(ids), self.num_outputs, dtype=torch.float32, device="cpu")
        return parameters, self._run(ids, state, tensors, parameters, 1, self._rows(state, state.position))

    def widened(self, state: State) -> State:
        """Return a state of a model in 16 bits as the step keeps it: the last inputs in float32, keys and values not in float16.

        Steps and prompts take either; a state that is written in place, by `over`, has to be one of these. Other states: itself.
        """
        if self.program is not None:
            return self.program.widened(state)
        if not self._narrow or state.layers is self._checked[1]:
            return state
        return replace(state, layers=tuple(map(widened, state.layers)))

    def check(self, state: ModelState) -> None:
        """Raise UnfitState for anything but the state of one row, as this model makes it."""
        check_state(state, self.new_row, 1)

    def over(self, state: ModelState, parameters: Float[Tensor, "b p"]) -> Callable[[Int[Tensor, " b"]], None]:
        """One token per row, again and again in the same memory: a function of tokens (b,), int64 and contiguous.

        It writes into this state and these parameters, as `__call__` does in place; the state is looked at here, once. Where rows
        have caches of their own (`RowCaches`), their positions count the keys: a step raises ValueError where one is full, and
        writes nothing. Raises UnfitState as a step does, and ValueError for a `KVCache`, whose length would have to be counted.
        """
        if any(isinstance(x, KVCache) for x in state.layers):
            raise ValueError(
                "a state with one length for all rows of a key/value cache changes with each token; call the step with each new "
                "state, or give each row a cache of its own: RowCaches."
            )
        if self.program is not None:
            return self.program.over(state, parameters)
        tensors, lengths = self._check_room(state, len(state.position), 0), lengths_of(state.layers)

        def step(token_ids: Tensor) -> None:
            self._compute(token_ids, state, tensors, lengths, parameters, self._rows(state, state.position))

        return step

    def prefill(
        self,
        token_ids: Int[Tensor, "b t"],
        state: State,
        attention_mask: Tensor | None = None,
        *,
        inplace: bool = False,
        every: bool = False,
    ) -> tuple[Float[Tensor, "b p"] | Float[Tensor, "b t p"], State]:
        """Read tokens (b, t): (parameters or logits (b, p) after each row's last token, float32; the state after it).

        To the last bit what t steps give, in any number of pieces. attention_mask (b, t): 0 for padding, anywhere; a row has one
        token at least. every: parameters after each token, (b, t, p), zeros at padding. Memory is that of `ROWS` tokens,
        whatever t is.

        Raises ValueError as a step does; nothing is written then.
        """
        if self.program is not None:
            return self.program.prefill(token_ids, state, attention_mask, inplace=inplace, every=every)
        state = self.widened(state if inplace else state.clone())
        ids, real = check_tokens(token_ids, attention_mask, len(self.tokens))
        b, t = ids.shape
        tensors = self._check_room(state, b, t)
        self._check_length(state.position + (t if real is None else real.sum(-1)) - 1)
        if real is not None:
            state = replace(state, layers=tuple(map(masked, state.layers)))
            tensors = self._tensors_of(state, b)
        last = torch.empty(b, self.num_outputs, dtype=torch.float32, device="cpu")
        parameters = last.new_zeros(b, t, self.num_outputs) if every else None
        for start in range(0, t, piece := max(1, ROWS // max(b, 1))):
            part = slice(start, start + piece)
            rows = rows_of(ids[:, part], None if real is None else real[:, part])
            extra = self._rows(state, rows.positions(state.position), rows.sequences)
            out = last if parameters is None else last.new_empty(len(rows.ids), self.num_outputs)
            num_slots = ids[:, part].shape[1]
            state = self._run(rows.ids, state, tensors, out, num_slots, extra, rows.starts, rows.slots, every)
            if parameters is not None:
                parameters[:, part][rows.real] = out
        return last if parameters is None else parameters, state

    def _run(
        self,
        ids: Tensor,
        state: State,
        tensors: list[Tensor],
        out: Tensor,
        num_slots: int,
        extra: Tensor | None,
        starts: Tensor | None = None,
        slots: Tensor | None = None,
        every: bool = False,
    ) -> State:
        """The state after these tokens, whose places in a cache are `num_slots`. tensors: those of the state."""
        self._compute(ids, state, tensors, lengths := lengths_of(state.layers), out, extra, starts, slots, every)
        if len(lengths):
            layers = longer(state.layers, num_slots)
            state, self._checked = replace(state, layers=layers), (len(state.position), layers, tensors)
        return state

    def _compute(
        self,
        ids: Tensor,
        state: ModelState,
        tensors: list[Tensor],
        lengths: Tensor,
        out: Tensor,
        extra: Tensor | None,
        *rows: Any,
    ) -> None:
        """Call the kernel. lengths: of the caches. rows: starts, slots and every, as `run` takes them."""
        tables = self.packed_plan, self.packed_weights, self.tokens, self.places
        try:
            run(ids, state.position, *tables, extra, tensors, lengths, out, *self._numbers, *rows)
        except RuntimeError as error:
            self._check_length(state.position)
            raise ValueError(str(error).splitlines()[0]) from error

    def _check_room(self, state: ModelState, rows: int, num_slots: int) -> list[Tensor]:
        """The tensors of `_tensors_of`. Also ValueError where a cache has no room for so many tokens."""
        tensors = self._tensors_of(state, rows)
        check_room(state, num_slots)
        return tensors

    def _tensors_of(self, state: ModelState, num_rows: int) -> list[Tensor]:
        """The tensors that the kernel writes. ValueError where it can't: they are looked at once, while the same ones come."""
        (rows, layers, checked), position = self._checked, state.position
        fits = position.shape == (num_rows,) and position.dtype == torch.int64 and position.is_contiguous()
        if state.layers is layers and rows == num_rows and fits:
            return checked
        tensors = [x for layer in state.layers for x in tensors_of(layer)]
        same = len(tensors) == len(checked) and all(map(is_, tensors, checked))
        if not (same and tensors and rows == num_rows and fits):
            check_state(state, self._expected, num_rows)
        self._checked = num_rows, state.layers, tensors
        return tensors

    def _place_table(self, plan: Plan) -> tuple[Tensor | None, Callable[[Tensor], Tensor] | None]:
        """The embeddings of positions: a table, or for too many of those that a formula gives a function; or neither."""
        places = plan.places
        if isinstance(places, Tensor):
            return self._wide(places.float().clone(), behind=True), None
        return None, places

    def _rows(self, state: ModelState, positions: Tensor, sequences: Tensor | None = None) -> Tensor | None:
        """Return what is added to the embeddings, (n, hidden): the row's class, and the position where no table has it.

        sequences: the row of each token; None: one token of each row.
        """
        condition, rows = getattr(state, "condition", None), None
        if condition is not None:
            rows = self._wide((condition if sequences is None else condition[sequences]).float() * self.scale)
        if self._place_of is not None:
            self._check_length(positions)
            place = self._wide(self._place_of(positions[:, None])[:, 0], behind=True)
            rows = place if rows is None else rows + place
        return rows

    def _wide(self, x: Tensor, behind: bool = False) -> Tensor:
        """(n, hidden), one row after the other: with zeros where positions stand after the embedding and not in it."""
        missing = self.hidden - x.shape[-1]
        return (pad(x, (missing, 0) if behind else (0, missing)) if missing else x).contiguous()

    def _check_length(self, positions: Tensor) -> None:
        if self.limit is not None and len(positions):
            check_length(self.model.config, 1, int(positions.max()))


def step_of(model: nn.Module, weights: str | None, copy_tokens: bool) -> ProgramStep:
    """Make the step of a model's program. copy_tokens: as in `FusedStep`; weights: None for the format that rounds none."""
    program = checked_program(model)
    embed = program.instructions[0]
    weights = weights or default_format(embed.weights["tokens"].dtype)
    if copy_tokens:
        tables = {name: x.clone() for name, x in embed.weights.items()}
        program = replace(program, instructions=(replace(embed, weights=tables), *program.instructions[1:]))
    return ProgramStep(model, Runtime(program, weights))


def program_step(model: nn.Module, weights: str, states: Sequence[LayerState], copy_tokens: bool) -> ProgramStep | None:
    """Return the step of the model's program; None where the plan computes.

    It does where there is no program that runs compiled, or one whose states are not as wide as `states`, which caches of
    transformers hold.
    """
    try:
        step = step_of(model, weights, copy_tokens)
    except (ProgramError, Refusal):
        return None
    return step if shapes_of(step.expected) == shapes_of(states) else None


def shapes_of(states: Sequence[LayerState]) -> list[tuple[type, list[torch.Size]]]:
    """Return the class and the shapes of each of some states of one row."""
    return [(type(x), [y.shape for y in tensors_of(x)]) for x in states]


def _states_of(x: Attention | Mixer) -> tuple[LayerState, ...]:
    """One row of a layer's states, without numbers."""
    if isinstance(x, Attention) and x.hybrid is not None:
        return x.hybrid.new_states(x.heads[2], x.num_features, 1, 1, "meta")
    return (x.new_state(),)
