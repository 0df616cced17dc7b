"""The bodies of /v1/states: what is read into a state, and a held state as clients see it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from tarnn.serving.http.wire import IDS, Message, Several, Wire

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MOST_LISTED = 1000  # states: more would hold the loop up
Name = Annotated[str, Field(pattern=NAME)]


class StateRequest(Wire):
    """One of text, tokens and messages is read, behind `state` if that names one; the state after it gets an id."""

    model: str | None = None
    text: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"anyOf": [IDS, {"type": "null"}]})] = None
    messages: Annotated[Several[Message], Field(min_length=1)] | None = None
    state: str | None = None
    name: Name | None = None
    stream: bool | None = None


class ModelQuery(Wire):
    model: str | None = None


class ListQuery(ModelQuery):
    """after: the last state of the page before."""

    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] | None = None
    after: str | None = None


class UploadQuery(ModelQuery):
    name: Name | None = None


class StateQuery(UploadQuery):
    """The parameters of a text that is a body of its own."""

    state: str | None = None
    stream: bool | None = None


class ForkRequest(Wire):
    name: Name | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class StateUsage(BaseModel):
    """prompt_tokens: all that the state has seen; cached: those that were not read again."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: Literal[0] = 0
    total_tokens: int


class StateObject(BaseModel):
    """bytes: of the state in memory. where: memory, or disk too. usage: in the answer to the request that made it."""

    id: str
    object: Literal["state"] = "state"
    model: str
    name: str | None
    tokens: int
    bytes: int
    created: int
    parent: str | None
    where: str
    usage: StateUsage | None = None


class StateList(BaseModel):
    object: Literal["list"] = "list"
    data: list[StateObject]
    has_more: bool


class DeletedState(BaseModel):
    id: str
    object: Literal["state"] = "state"
    deleted: Literal[True] = True


class StateProgress(BaseModel):
    """How far the reading is: an event of a streamed creation, whose last one holds the state."""

    object: Literal["state.progress"] = "state.progress"
    tokens_read: int
    tokens: int
    state: StateObject | None = None
