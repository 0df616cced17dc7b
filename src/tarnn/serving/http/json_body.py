"""A request's body as JSON: its values are counted before any of them is made, so that no body takes seconds or gigabytes."""

from typing import Any

import numpy as np
from pydantic_core import from_json

from tarnn.serving.http.errors import bad

MOST_VALUES = 2**20 + 2**16  # of a body: the ids of the longest prompt, and what stands around them
MOST_NESTED = 2**16  # lists and objects of a body
MOST_KEYS = 2**14  # names of values in its objects: each may be wrong, and each wrong one is an error to be told
SHORT = 2**14  # bytes of a body that can't have too many of anything


def read_json(body: bytes) -> Any:
    """The value that the body stands for. Raises ApiError (400) for what is no JSON, or too much of it."""
    if len(body) > SHORT:
        check_counts(body)
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad(f"The body is not JSON: {error}.") from None


def check_counts(body: bytes) -> None:
    """Raise ApiError for a body of too many values. What stands in a text is not counted."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(body, np.uint8)
    outside = ~np.logical_xor.accumulate(characters == ord('"'))
    for signs, most, name in (
        (",", MOST_VALUES - 1, "values"),
        ("[{", MOST_NESTED, "lists and objects"),
        (":", MOST_KEYS, "named values"),
    ):
        count = sum(int(np.count_nonzero((characters == ord(sign)) & outside)) for sign in signs)
        if count > most:
            raise bad(f"The body has {count:,} {name}; at most {most:,} are read at once.", code="too_many_values")
