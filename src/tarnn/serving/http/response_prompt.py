"""What a response reads: its input behind the state of the response before."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest

from tarnn.serving.http.asking import tenant
from tarnn.serving.http.chat import opened
from tarnn.serving.http.conversation import continued
from tarnn.serving.http.errors import bad
from tarnn.serving.http.held import in_store, store_of
from tarnn.serving.http.prompts import Ids, prompt_ids
from tarnn.serving.http.response_wire import ResponseRequest
from tarnn.serving.snapshot import Snapshot


class Prompt(NamedTuple):
    """ids: behind `begin`, a state of the id `parent`. boundaries: as in a `Request`."""

    ids: Ids
    begin: Snapshot | None
    parent: str | None
    boundaries: tuple[int, ...] = ()


async def prompt_of(request: HttpRequest, engine: Any, asked: ResponseRequest) -> Prompt:
    """Raises ApiError: 404 for a response or a state that this tenant doesn't have, 400 for what can't be read."""
    if asked.previous_response_id is not None and asked.state is not None:
        raise bad("Give previous_response_id or state: a response goes on from one place.", "state")
    param = "state" if asked.previous_response_id is None else "previous_response_id"
    parent, begin, answered = asked.previous_response_id or asked.state, None, False
    if parent is not None:
        store = store_of(engine)
        info = await in_store(store.info, tenant(request), parent, param=param)
        begin, parent = await in_store(store.get, tenant(request), info.id, param=param), info.id
        answered = asked.previous_response_id is not None or bool(info.note)
    if engine.model.tokenizer.chat_template:
        return await chat_prompt(request, engine, asked, begin, parent, answered)
    return await text_prompt(request, engine, asked, begin, parent)


async def chat_prompt(
    request: HttpRequest,
    engine: Any,
    asked: ResponseRequest,
    begin: Snapshot | None,
    parent: str | None,
    answered: bool,
) -> Prompt:
    """answered: whether `begin` ends with an answer; else it is a text that was read, behind which a conversation begins."""
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += [message.plain for message in asked.input or ()]
    if not messages:
        raise bad("The parameter input is missing.", "input", "missing_required_parameter")
    boundaries: Sequence[int]
    if begin is not None and answered:
        ids, boundaries = await asyncio.to_thread(continued, engine.model, messages, int(begin.tokens[-1])), ()
    else:
        ids, boundaries = await asyncio.to_thread(opened, engine.model, messages)
    ids = await prompt_ids(engine.model, ids, "input", most=request.app.state.settings.max_prompt)
    past = 0 if begin is None else len(begin.tokens)
    return Prompt(ids, begin, parent, tuple(past + place for place in boundaries))


async def text_prompt(
    request: HttpRequest, engine: Any, asked: ResponseRequest, begin: Snapshot | None, parent: str | None
) -> Prompt:
    """Of a model that was trained on texts alone: the input is continued, as it stands."""
    for value, param in ((asked.instructions, "instructions"), (asked.input, "input")):
        if value and not (param == "input" and isinstance(value, str)):
            raise bad(
                f"{engine.model.name} has no chat template: it continues a text and knows no messages or instructions. Give "
                "input as one string, or add a chat template to the tokenizer.",
                param,
                "no_chat_template",
            )
    most = request.app.state.settings.max_prompt
    ids = await prompt_ids(engine.model, str(asked.input or ""), "input", most=most, goes_on=begin is not None)
    return Prompt(ids, begin, parent)
