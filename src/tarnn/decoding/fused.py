"""A fused step for the token loop: the whole model in one call of a compiled kernel, for one token or a prompt.

It computes the program of a model (`decoding/live.py`); results agree with `model.step` to float32 rounding. Weights may be kept
in fewer bits.
"""

from dataclasses import replace

import torch
from torch import nn

from tarnn.decoding.from_program import default_format
from tarnn.decoding.live import program_of
from tarnn.decoding.program_step import ProgramStep
from tarnn.decoding.refusal import OldKernels, Refusal
from tarnn.errors import UserError
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program.fusion import Fusion
from tarnn.program.instructions import Program
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import OtherVersion, Runtime, Unavailable, check_kernels


def refusal(model: nn.Module, *, anywhere: bool = False) -> str | None:
    """Why there is no fused step for this model, or None. anywhere: judge it as if its weights were float32 on a CPU."""
    try:
        Fusion(checked_program(model, anywhere=anywhere))
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


class FusedStep(ProgramStep):
    """A copy of a model's weights, packed, with which one call of a kernel computes what `model.step` does.

        step = FusedStep(model, weights="int8")
        parameters, state = step.prefill(prompt_ids, state)  # as model.prefill
        parameters, state = step(token_ids, state)  # as model.step; inplace=True writes into the state

    weights: float32 | bfloat16 | int8 | int4, how the layers' matrices are kept; the sums over them, states and all else are
    float32. None: bfloat16 for a model in bfloat16, else float32, so that no weight is rounded. With int8 and int4, rows of
    activations become bytes too (see `tarnn.kernels.cpu.products`), and the head is int8, a small one bfloat16.
    copy_tokens: False shares the table of embeddings, which stays in the model's type, with a model that is written no more.

    The copy is made here, once, and never follows the model: a step goes on with the weights of its making, whatever
    training, loading or writing does to the model's later. To use those, make another step. Several threads may call a
    step at once, each with a state of its own.

    Raises Refusal, a ValueError, for a model that has no fused step (see `refusal`), and ValueError for an unknown format.
    """

    def __init__(self, model: nn.Module, weights: str | None = None, *, copy_tokens: bool = True):
        if weights is not None and weights not in FORMATS:
            raise ValueError(f"weights must be one of {', '.join(FORMATS)}; got {weights!r}.")
        with torch.no_grad():
            try:
                program = checked_program(model)
                weights = weights or default_format(program.instructions[0].weights["tokens"].dtype)
                runtime = Runtime(with_own_tables(program) if copy_tokens else program, weights)
            except (Refusal, ProgramError) as reason:
                raise Refusal(f"there is no fused step for this model: {reason}. Use model.step.") from reason
        super().__init__(model, runtime)


def with_own_tables(program: Program) -> Program:
    """Return the program with copies of its tables of embeddings."""
    embed = program.instructions[0]
    tables = {name: x.clone() for name, x in embed.weights.items()}
    return replace(program, instructions=(replace(embed, weights=tables), *program.instructions[1:]))
