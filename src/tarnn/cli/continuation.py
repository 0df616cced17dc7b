"""A prompt continued: read in pieces, then token after token, to stdout as it is made."""

import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tarnn.cli.output import Output, same_stream, writes_to_file
from tarnn.cli.progress import progress
from tarnn.decoding.caches import caches_of, copy_of
from tarnn.decoding.drafts import MOST, DraftLoop, token_loop
from tarnn.decoding.draws import Sampling, check_sampling, row_sampler
from tarnn.decoding.lm import LM
from tarnn.decoding.loop import PIECE, TokenLoop
from tarnn.decoding.memory import check_state
from tarnn.decoding.opened import Opened
from tarnn.decoding.samplers import Sampler
from tarnn.decoding.state_file import SavedState, check_writable, load_state, save_state
from tarnn.decoding.streaming import KEEP, StopStrings, TextStream
from tarnn.decoding.threads import threads_for_steps
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.models.state import ModelState


def read_prompt(prompt: str | None, prompt_file: str | None, state_in: Path | None) -> bytes:
    """The prompt's bytes: the argument, a file or stdin, whichever was given; none at all is an empty one."""
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file were both given; give one of them.")
    if prompt is not None:
        return prompt.encode("utf-8", "surrogateescape")  # the bytes that were typed
    if prompt_file is None and (state_in is not None or not is_piped(sys.stdin)):
        return b""
    if prompt_file in (None, "-"):
        if sys.stdin is None:
            raise UserError("stdin is closed, so there is no prompt in it; give --prompt or --prompt-file.")
        return sys.stdin.buffer.read()
    try:
        return Path(prompt_file).read_bytes()
    except OSError as error:
        raise UserError(
            f"the prompt can't be read from {prompt_file}: {error.strerror}. Give a file, or --prompt."
        ) from error


def is_piped(stream) -> bool:
    """A pipe or a file, so there is an end to wait for; not a terminal, a device or nothing at all."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@dataclass(frozen=True)
class Request:
    """The options of `tarnn generate` for a model of text."""

    checkpoint: Path
    prompt: str | None = None
    prompt_file: str | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    state_in: Path | None = None
    state_out: Path | None = None
    cache: str | None = None
    draft: int = 0
    num_samples: int = 1


def continue_prompt(
    request: Request, load: Callable[[], LM], sampling: dict[str, Any], seed: int, *, report: Log
) -> None:
    """Reads the prompt, and writes its continuation to stdout; the state to a file where that is asked for.

    `load` opens the model; `sampling` are the options that were given.
    """
    count, limit = request.num_samples, request.max_new_tokens
    check_draft(request.draft, count)
    check_numbers(limit, count, alike=sampling.get("temperature") == 0, saved=request.state_out is not None)
    # errors of these now, not after the prompt was read
    check_sampling(Sampling(**sampling), 0)
    StopStrings(request.stop)
    if request.state_out:
        check_writable(request.state_out)
    if request.cache and request.state_in:
        raise UserError("--cache is for a new state; that of --state-in keeps what it has. Leave one of them out.")
    text = read_prompt(request.prompt, request.prompt_file, request.state_in)
    lm = load()
    model = lm.opened
    check_states(model, request)
    saved = None if request.state_in is None else load_state(request.state_in, model)
    begins = saved is None or not saved.state.position.any()
    ids = lm.ids(text, starts=begins)[None].to(model.device)
    loop, recent = start(model, request, saved, ids.shape[1], limit)
    report("tarnn: " + "; ".join(model.about))
    read(loop, ids, report)
    if count > 1:
        loop.fork(count)
    context = [*recent, *ids[0].tolist()]
    chosen, vocab_size = lm.sampling(**sampling), model.config.vocab_size
    draw = row_sampler(chosen, vocab_size, seed=seed, prompt=context, num_rows=count)
    rows = [TextStream(lm.decode, context[-2 * KEEP :], request.stop) for _ in range(count)]
    if limit:
        with threads_for_steps(model):
            write(loop, draw, limit, rows, report, goes_on=request.state_out is not None)
    if request.state_out:
        assert loop.logits is not None  # a prompt was read, or a separator, or a state
        size = save_state(request.state_out, model, loop.state, loop.logits, rows[0].recent)
        report(f"tarnn: state after {int(loop.state.position[0]):,} tokens in {request.state_out} ({size:,} bytes)")


def check_numbers(max_new_tokens: int, num_samples: int, *, alike: bool, saved: bool) -> None:
    """UserError for numbers out of range, and for several samples where there is sense in one only."""
    if max_new_tokens < 0:
        raise UserError(f"--max-new-tokens must be 0 or more; got {max_new_tokens}.")
    if num_samples < 1:
        raise UserError(f"--num-samples must be 1 or more; got {num_samples}.")
    if num_samples > 1 and (alike or saved):
        why = "--greedy (all would be alike)" if alike else "--state-out (a state is that of one sequence)"
        raise UserError(f"--num-samples {num_samples} does not go with {why}. Leave one of them out.")


def check_draft(draft: int, num_samples: int) -> None:
    """UserError for a number of drafts that no pass reads, and for drafts of several samples."""
    if not 0 <= draft <= MOST:
        raise UserError(f"--draft must be from 0 (off) to {MOST}; got {draft}.")
    if draft and num_samples > 1:
        raise UserError(f"--draft {draft} does not go with --num-samples {num_samples}. Leave one of them out.")


def check_states(model: Opened, request: Request) -> None:
    """UserError for options about states that this model does not have."""
    state = model.new_state(1, 0)
    if not isinstance(state, ModelState):  # a cache of transformers
        for name in ("state_in", "state_out", "cache"):
            if getattr(request, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} takes a fused step, and this model has none. Leave it out."
                )
    elif request.cache is not None:
        kept, narrow = (
            {cache.k.dtype for x in model.new_state(1, 0, dtype).layers for cache in caches_of(x)}
            for dtype in (None, torch.bfloat16)
        )
        if (kept, narrow) != ({torch.float32}, {torch.bfloat16}):
            raise UserError(
                f"--cache {request.cache} is for softmax layers that keep float32 by default; this model "
                f"{f'keeps {kept.pop()}' if kept else 'has none'}. Leave it out."
            )


def start(
    model: Opened, request: Request, saved: SavedState | None, num_prompt: int, max_new_tokens: int
) -> tuple[TokenLoop, list[int]]:
    """A loop with room for all that is to come: empty, or with a saved state and its last tokens."""
    room = num_prompt + max_new_tokens
    if saved is None:
        check_positions(0, num_prompt, max_new_tokens, model.config.max_position_embeddings)
        check_state(model, request.num_samples, room)
        sizes = (1, room) if request.cache is None else (1, room, torch.bfloat16)
        return token_loop(model, model.new_state(*sizes), draft=request.draft), []
    state, logits, recent = saved
    check_positions(int(state.position[0]), num_prompt, max_new_tokens, model.config.max_position_embeddings)
    room += int(state.position.max())
    return token_loop(model, copy_of(state, room), logits, draft=request.draft), recent


def check_positions(before: int, num_prompt: int, max_new_tokens: int, limit: int | None) -> None:
    if limit is not None and before + num_prompt + max_new_tokens > limit:
        state = f"{before:,} tokens of the state, " if before else ""
        raise UserError(
            f"this model has {limit:,} positions; {state}{num_prompt:,} of the prompt and {max_new_tokens:,} "
            f"new ones are more. Lower --max-new-tokens, shorten the prompt, or take a model without a limit."
        )


def read(loop: TokenLoop, ids: Tensor, report: Log) -> None:
    """Read the prompt into the state."""
    start, pieces = time.perf_counter(), ids.split(PIECE, dim=1)
    for piece in progress(pieces, ids.shape[1], "tokens of the prompt read", report, size=lambda x: x.shape[1]):
        loop.read(piece)
    if ids.shape[1]:
        report(f"tarnn: prompt {speed(ids.shape[1], time.perf_counter() - start)}")


def write(loop: TokenLoop, draw: Sampler, limit: int, rows: list[TextStream], report: Log, *, goes_on: bool) -> None:
    """Makes the tokens. One row's text goes out as it is made, that of several rows at the end."""
    out, num_made, start = Output(), 0, time.perf_counter()
    ends = loop.model.end_ids
    tokens = loop.tokens(draw, limit, end_ids=ends, pad_id=loop.model.pad_id)
    seen = len(rows) == 1 and not writes_to_file()  # then the text itself shows how far it is
    for token in tokens if seen else progress(tokens, limit, "tokens made", report):
        num_made += 1
        for row, token_id in zip(rows, token.tolist(), strict=True):
            row.push(token_id, ends)
        if len(rows) == 1:
            out.write(rows[0].take())
        if out.closed or all(row.over for row in rows):
            break
    seconds = time.perf_counter() - start
    for i, row in enumerate(rows):
        row.finish("--max-new-tokens reached", goes_on=goes_on)
        out.write((f"--- sample {i + 1} ---\n" if len(rows) > 1 else "") + row.take())
        out.end_line(always=len(rows) > 1 or same_stream())
    why = "nobody reads on" if out.closed else ", ".join(dict.fromkeys(row.over for row in rows))
    report(f"tarnn: made {speed(num_made * len(rows), seconds)}; {why}; {loop.state.nbytes:,} bytes of state")
    if isinstance(loop, DraftLoop):
        report(f"tarnn: {loop.accepted:,} of {loop.drafted:,} drafts were right; {loop.passes:,} passes")


def speed(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens:,} tokens in {seconds:.2f} s ({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)"
