"""Look states up in stores, whose refusals become errors over HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.http.to_engine import tenant
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.state_info import NameTaken, StateInfo, StoreFull, StoreTrouble, UnfitState, UnknownState

Result = TypeVar("Result")
REFUSALS: dict[type[Exception], tuple[int, str]] = {
    UnknownState: (404, "state_not_found"),
    NameTaken: (409, "name_taken"),
    StoreFull: (507, "store_full"),
    StoreTrouble: (507, "store_trouble"),
    UnfitState: (400, "unfit_state"),
}


def store_of(engine: Any, param: str | None = None) -> Any:
    """Return the engine's store. Raises ApiError if there is none."""
    if engine.store is None:
        raise bad("This server keeps no states.", param, "no_store")
    return engine.store


async def held_state(request: HttpRequest, engine: Any, name: str | None) -> Snapshot | None:
    """Return the state that the request begins from. Raises ApiError (404) if this tenant has none of that name."""
    if name is None:
        return None
    return await in_store(store_of(engine, "state").get, tenant(request), name, param="state")


async def in_store(call: Callable[..., Result], *arguments: Any, param: str | None = None, **options: Any) -> Result:
    """Call a store in a thread, since it may wait for the disk. Raises ApiError if the store refuses.

    Another tenant's state and one that never was give the same error.
    """
    try:
        return await asyncio.to_thread(call, *arguments, **options)
    except tuple(REFUSALS) as error:
        status, code = next(refusal for kind, refusal in REFUSALS.items() if isinstance(error, kind))
        param = param or ("name" if status == 409 else None)
        raise ApiError(status, sentence(error), param=param, code=code) from None


def sentence(error: Exception) -> str:
    """Return its text with a capital. A KeyError's `str` would put quotes around it."""
    text = str(error.args[0]) if error.args else "there is no such state."
    return text[:1].upper() + text[1:]


async def find(request: HttpRequest, name: str, param: str | None = None) -> tuple[Any, StateInfo]:
    """Return the engine that has a state of this tenant with that id or name, and the store's record of it."""
    missing = ApiError(404, f"There is no state {name[:100]!r}.", param=param, code="state_not_found")
    for engine in request.app.state.engines.values():
        if engine.store is None:
            continue
        try:
            return engine, await in_store(engine.store.info, tenant(request), name, param=param)
        except ApiError as error:
            if error.status != 404:
                raise
            missing = error
    raise missing
