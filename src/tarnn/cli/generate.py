"""`tarnn generate`: a prompt in, its continuation out, as it is made."""

import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor
from typer import Argument, Option

from tarnn.cli.output import Output
from tarnn.cli.prompt import prompt_ids, read_prompt
from tarnn.errors import UserError
from tarnn.generation import samplers
from tarnn.generation.checkpoint import open_config, open_model, open_tokenizer
from tarnn.generation.compiled import choose, compile_step
from tarnn.generation.loop import PIECE, TokenLoop
from tarnn.generation.state_file import check_writable, load_state, save_state
from tarnn.generation.streaming import KEEP, StopStrings, TextStream, decoder
from tarnn.generation.threads import threads_for_steps

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Tell = Callable[[str], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def generate(
    checkpoint: Annotated[Path, Argument(help="A checkpoint folder, as `tarnn train --out` writes it.")],
    prompt: Annotated[str | None, Option(help="The text to continue; '' is the start of a document.")] = None,
    prompt_file: Annotated[
        str | None, Option(help="A file to continue; - is stdin, which is also read if a pipe is all we get.")
    ] = None,
    max_new_tokens: Annotated[int, Option(help="How many at most; 0 only reads the prompt.")] = 256,
    temperature: Annotated[float, Option(help="Below 1 sharper, above 1 flatter, 0 greedy.")] = 1.0,
    top_k: Annotated[int, Option(help="Choose among the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, Option(help="Choose among the most likely tokens that reach p together.")] = 1.0,
    greedy: Annotated[bool, Option("--greedy", help="The most likely token, as --temperature 0.")] = False,
    seed: Annotated[int | None, Option(help="The same seed, the same tokens.")] = None,
    num_samples: Annotated[int, Option(help="Continuations; the prompt is read once.")] = 1,
    stop: Annotated[list[str] | None, Option(help="Stop before this text. May be repeated.")] = None,
    state_in: Annotated[Path | None, Option(help="Go on from a state saved with --state-out.")] = None,
    state_out: Annotated[Path | None, Option(help="Save the state after the last token here.")] = None,
    compile: Annotated[bool | None, Option(help="Compile the step first. Default: where it pays.")] = None,
    device: Annotated[str, Option(help="cpu, cuda, mps …; auto: an accelerator if there is one.")] = "auto",
    dtype: Annotated[Dtype, Option(help="auto: as saved.")] = "auto",
    quiet: Annotated[bool, Option("--quiet", "-q", help="The text only, nothing on stderr.")] = False,
) -> None:  # fmt: skip
    """Continue a prompt with a trained model, as an RNN: constant time and memory a token.

    The text goes to stdout as it is made, everything else to stderr. A state saved with --state-out stands
    for all that came before it, read or made: read a book once with `--prompt-file book.txt --max-new-tokens
    0 --state-out book.state`, continue it many times with `--state-in book.state`.
    """
    check_numbers(
        max_new_tokens, num_samples, seed, alike=greedy or temperature == 0, one=state_out is not None
    )
    where, seed = pick_device(device), secrets.randbelow(2**31) if seed is None else seed
    draw = samplers.sampler(
        temperature=0 if greedy else temperature, top_k=top_k, top_p=top_p,
        generator=torch.Generator(where).manual_seed(seed),
    )  # fmt: skip
    StopStrings(stop or ())  # its errors now, not after the prompt was read
    if state_out:
        check_writable(state_out)
    open_config(checkpoint)  # its errors before those of the prompt, and before the weights are read
    text = read_prompt(prompt, prompt_file, state_in)
    model = open_model(checkpoint, dtype=DTYPES.get(dtype), device=where)
    tokenizer = open_tokenizer(checkpoint)
    ids = prompt_ids(tokenizer, text, model, starts=state_in is None)
    loop, recent = start(model, state_in, ids.shape[1], max_new_tokens)

    tell = (lambda _: None) if quiet else partial(print, file=sys.stderr, flush=True)
    chance = f"temperature {temperature:g}, top-k {top_k or 'off'}, top-p {top_p:g}, seed {seed}"
    tell(f"tarnn: {checkpoint}, {str(model.dtype).removeprefix('torch.')} on {where}; "
         f"{'greedy' if greedy or temperature == 0 else chance}")  # fmt: skip
    read(loop, ids, tell)
    if num_samples > 1:
        loop.fork(num_samples)
    context = [*recent, *ids[0, -KEEP:].tolist()]
    rows = [TextStream(decoder(tokenizer), context, stop or ()) for _ in range(num_samples)]
    if max_new_tokens:
        prepare_step(loop, compile, max_new_tokens, tell)
        with threads_for_steps(model):
            write(loop, draw, max_new_tokens, rows, tell, goes_on=state_out is not None)
    if state_out:
        assert loop.logits is not None  # a prompt was read, or a separator, or a state
        size = save_state(state_out, model, loop.state, loop.logits, rows[0].recent)
        tell(f"tarnn: state after {int(loop.state.position[0]):,} tokens in {state_out} ({size:,} bytes)")


def check_numbers(max_new_tokens: int, num_samples: int, seed: int | None, *, alike: bool, one: bool) -> None:
    """UserError for numbers out of range, and for several samples where there is sense in one only."""
    if max_new_tokens < 0:
        raise UserError(f"--max-new-tokens must be 0 or more; got {max_new_tokens}.")
    if num_samples < 1:
        raise UserError(f"--num-samples must be 1 or more; got {num_samples}.")
    if seed is not None and not 0 <= seed < 2**63:
        raise UserError(f"--seed must be from 0 to below 2**63; got {seed}.")
    if num_samples > 1 and (alike or one):
        why = "--greedy (all would be alike)" if alike else "--state-out (a state is that of one sequence)"
        raise UserError(f"--num-samples {num_samples} does not go with {why}. Leave one of them out.")


def pick_device(name: str) -> torch.device:
    """The device of that name; for auto the accelerator, if there is one. UserError if it isn't there."""
    if name == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name} can't be used here: {str(error).splitlines()[0]}. Try cpu or auto."
        ) from error


def start(model, state_in: Path | None, num_prompt: int, max_new_tokens: int) -> tuple[TokenLoop, list[int]]:
    """A loop with room for all that is to come: empty, or with a saved state and its last tokens."""
    room = num_prompt + max_new_tokens
    if state_in is None:
        check_positions(0, num_prompt, max_new_tokens, model.config.max_position_embeddings)
        return TokenLoop(model, model.new_state(1, capacity=room)), []
    state, logits, recent = load_state(state_in, model, room=room)
    check_positions(int(state.position[0]), num_prompt, max_new_tokens, model.config.max_position_embeddings)
    return TokenLoop(model, state, logits), recent


def check_positions(before: int, num_prompt: int, max_new_tokens: int, limit: int | None) -> None:
    if limit is not None and before + num_prompt + max_new_tokens > limit:
        state = f"{before:,} tokens of the state, " if before else ""
        raise UserError(
            f"this model has {limit:,} positions; {state}{num_prompt:,} of the prompt and {max_new_tokens:,} "
            f"new ones are more. Lower --max-new-tokens, shorten the prompt, or take a model without a limit."
        )


def read(loop: TokenLoop, ids: Tensor, tell: Tell) -> None:
    """The prompt into the state, with a progress bar on a terminal if it is long."""
    start, pieces = time.perf_counter(), ids.split(PIECE, dim=1)
    if len(pieces) > 16 and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        pieces = track(pieces, "reading the prompt", console=Console(stderr=True), transient=True)
    for piece in pieces:
        loop.read(piece)
    tell(f"tarnn: prompt {speed(ids.shape[1], time.perf_counter() - start)}")


def prepare_step(loop: TokenLoop, wish: bool | None, num_tokens: int, tell: Tell) -> None:
    """Compiles the loop's step where that is wished for or pays, and says which step is taken and why."""
    compiled, why = choose(loop, wish, num_tokens)
    if compiled:
        try:
            why += f"; it took {compile_step(loop):.1f} s"
        except Exception as error:  # torch.compile raises many kinds
            reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(
                "."
            )  # what follows is advice to developers
            if wish:
                raise UserError(f"the step can't be compiled: {reason}. Leave --compile out.") from error
            compiled, why = False, f"compiling failed: {reason}"
    tell(f"tarnn: {'compiled' if compiled else 'eager'} step ({why})")


def write(
    loop: TokenLoop, draw: samplers.Sampler, limit: int, rows: list[TextStream], tell: Tell, *, goes_on: bool
) -> None:
    """Makes the tokens. One row's text goes out as it is made, that of several rows at the end."""
    out, made, start = Output(), 0, time.perf_counter()
    ends, pad = end_ids(loop.model), loop.model.config.pad_token_id or 0
    for token in loop.tokens(draw, limit, end_ids=ends, pad_id=pad):
        made += 1
        for row, one in zip(rows, token.tolist(), strict=True):
            row.push(one, ends)
        if len(rows) == 1:
            out.write(rows[0].take())
        if out.closed or all(row.over for row in rows):
            break
    seconds = time.perf_counter() - start
    for i, row in enumerate(rows):
        row.finish("--max-new-tokens reached", goes_on=goes_on)
        out.write((f"--- sample {i + 1} ---\n" if len(rows) > 1 else "") + row.take())
        out.end_line(always=len(rows) > 1)
    why = "nobody reads on" if out.closed else ", ".join(dict.fromkeys(row.over for row in rows))
    tell(f"tarnn: made {speed(made * len(rows), seconds)}; {why}; {loop.state.nbytes:,} bytes of state")


def end_ids(model) -> set[int]:
    """The tokens that end a text, as `model.generate` has them."""
    ids = model.generation_config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


def speed(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens:,} tokens in {seconds:.2f} s ({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)"
