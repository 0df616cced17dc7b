"""Requests as they come over the wire: which parameters there are, and in which range."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tarnn.serving.http.errors import ApiError, bad

MOST_STOPS = 4
MOST_LOGPROBS = 20
LONGEST_STOP = 1000  # characters
LONGEST_VALUE = 60  # characters of a value that an error quotes

REFUSED = {  # parameters of OpenAI's API that are not here, and why
    "tools": "Tools are not supported: the models served here were not trained to call them.",
    "tool_choice": "Tools are not supported: the models served here were not trained to call them.",
    "parallel_tool_calls": "Tools are not supported: the models served here were not trained to call them.",
    "functions": "Functions are not supported: the models served here were not trained to call them.",
    "function_call": "Functions are not supported: the models served here were not trained to call them.",
    "response_format": "response_format is not supported: answers are not held to a grammar. Ask for the format in the prompt.",
    "best_of": "best_of is not supported: ask for n choices with logprobs and take the best yourself.",
    "suffix": "suffix is not supported: the models served here continue a text and don't fill a gap in it.",
}
Refused = Annotated[None, Field(exclude=True)]


def one_or_many(value: Any) -> Any:
    """A single string stands for a list of one."""
    return [value] if isinstance(value, str) else value


Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Wire(BaseModel):
    """Nothing is taken that has no meaning here: a typing error is not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
    refused: ClassVar[
        dict[str, str]
    ] = {}  # parameters that others have, or values of them, and why they are refused here


class StreamOptions(Wire):
    include_usage: bool | None = None


class Sampled(Wire):
    """What all requests for text share. None, as a missing parameter, is the default."""

    model: str | None = None
    state: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(one_or_many)] | None = None
    stream: bool | None = None
    user: str | None = None


class Generation(Sampled):
    """What completions and chats share beside that."""

    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(Generation):
    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Refused = None
    suffix: Refused = None
    response_format: Refused = None
    tools: Refused = None


class Part(Wire):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Refused = None
    tool_choice: Refused = None
    parallel_tool_calls: Refused = None
    functions: Refused = None
    function_call: Refused = None
    response_format: Refused = None
    best_of: Refused = None
    suffix: Refused = None


class TokenizeRequest(Wire):
    model: str | None = None
    prompt: str


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: list[int]


Shape = TypeVar("Shape", bound=Wire)


def parse(shape: type[Shape], body: bytes) -> Shape:
    """The body as that shape. Raises ApiError (400) with one sentence that names the parameter."""
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        raise said(error, shape) from None


def parse_query(shape: type[Shape], query: Mapping[str, str]) -> Shape:
    """The parameters behind a path's question mark as that shape. Raises ApiError as `parse` does."""
    try:
        return shape.model_validate_strings(dict(query))
    except ValidationError as error:
        raise said(error, shape) from None


def said(error: ValidationError, shape: type[Wire]) -> ApiError:
    """The first thing that is wrong, in a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return bad(f"The body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    if not place:
        return bad("The body must be a JSON object.")
    name = place[0]
    param = ".".join(part for part in place if part in (name, *shape.model_fields) or part.isdigit() or part in INNER)
    if name in shape.refused:
        return bad(shape.refused[name], name, "unsupported_parameter")
    if first["type"] == "none_required" and name in REFUSED:
        return bad(REFUSED[name], name, "unsupported_parameter")
    if first["type"] == "extra_forbidden":
        if name in REFUSED:
            return bad(REFUSED[name], name, "unsupported_parameter")
        unknown = ".".join(place)
        return bad(f"Unknown parameter: {quoted(unknown)}.", unknown[:LONGEST_VALUE], "unknown_parameter")
    if first["type"] == "missing":
        return bad(f"The parameter {param} is missing.", param, "missing_required_parameter")
    sentence = first["msg"].partition(" should ")[2] or first["msg"]
    return bad(f"{param} must {sentence}; got {quoted(first['input'])}.", param, "invalid_value")


INNER = ("role", "content", "text", "type", "name", "include_usage")


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"
