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
    except UnknownState as error:
        raise ApiError(404, sentence(error), param=param, code="state_not_found") from None
    except NameTaken as error:
        raise ApiError(409, sentence(error), param=param or "name", code="name_taken") from None
    except StoreFull as error:
        raise ApiError(507, sentence(error), param=param, code="store_full") from None
    except StoreTrouble as error:
        raise ApiError(507, sentence(error), param=param, code="store_trouble") from None
    except UnfitState as error:
        raise bad(sentence(error), param, "unfit_state") from None


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
