"""Requests as they come over the wire: which parameters there are, and in which range."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.http.json_body import read_json

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
# how pydantic calls the kinds that a value may be of, in the place of an error
TAG = re.compile(r"str|int|float|bool|(list|dict|function-\w+|nullable|constrained-\w+)(\[.*\]|\(.*\))?")
Refused = Annotated[None, Field(exclude=True)]


def one_or_many(value: Any) -> Any:
    """A single string stands for a list of one."""
    return [value] if isinstance(value, str) else value


Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
ManyStops = Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)]
Stops = Annotated[ManyStops, BeforeValidator(one_or_many, json_schema_input_type=Stop | ManyStops)]


class Wire(BaseModel):
    """Nothing is taken that has no meaning here: a typing error is not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
    # parameters that others have, or values of them, and why they are refused here
    refused: ClassVar[Mapping[str, str]] = {}


Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]  # a list of which the first wrong item is the only error


class StreamOptions(Wire):
    """continuous_usage_stats: usage so far in every chunk, not only behind the last; load tools ask for it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Wire):
    """Parameters of all requests for text. None, as a missing parameter, is the default."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool | None = None
    user: str | None = None
    state: str | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Stops | None = None


class Generation(Sampled):
    """What completions and chats share beside that."""

    refused: ClassVar[Mapping[str, str]] = REFUSED

    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None


ID = {"type": "integer", "minimum": 0}
TOKENS = {"type": "array", "items": ID}  # `prompts.ids_of` checks them
IDS = TOKENS | {"minItems": 1}
PROMPT = {  # `prompts.split` checks it: a union of models would say of a wrong one what each member lacks
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        IDS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": IDS, "minItems": 1},
    ]
}


class CompletionRequest(Generation):
    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = None
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
    content: str | Several[Part]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        plain = plain_message(self.role, self.content)
        return plain if self.name is None else plain | {"name": self.name}


def plain_message(role: str, content: str | list[Any]) -> dict[str, str]:
    """A message as a chat template takes it: its content, a text or pieces of one, as one text; the system by its older name."""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": "system" if role == "developer" else role, "content": text}


class ChatRequest(Generation):
    messages: Annotated[Several[Message], Field(min_length=1)]
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
    tokens: Annotated[Any, WithJsonSchema(TOKENS)]


Shape = TypeVar("Shape", bound=Wire)


def parse(shape: type[Shape], body: bytes) -> Shape:
    """The body as that shape. Raises ApiError (400) with one sentence that names the parameter."""
    try:
        return shape.model_validate(read_json(body))
    except ValidationError as error:
        raise said(error, shape) from None


def parse_query(shape: type[Shape], query: Mapping[str, str]) -> Shape:
    """The parameters behind a path's question mark as that shape. Raises ApiError as `parse` does."""
    try:
        return shape.model_validate_strings(dict(query))
    except ValidationError as error:
        raise said(error, shape) from None


def said(error: ValidationError, shape: type[Wire]) -> ApiError:
    """What is wrong deepest inside, in a sentence: of a value that may be this or that, the kind it came nearest to."""
    errors = error.errors(include_url=False, include_context=False)
    wrong = max(errors, key=lambda each: len(each["loc"]))
    place = [str(part) for i, part in enumerate(wrong["loc"]) if i == 0 or not TAG.fullmatch(str(part))]
    if not place:
        return bad("The body must be a JSON object.")
    name, param = place[0], ".".join(place)[:LONGEST_VALUE]
    if name in shape.refused:
        return bad(shape.refused[name], name, "unsupported_parameter")
    if wrong["type"] == "extra_forbidden":
        return bad(f"Unknown parameter: {quoted(param)}.", param, "unknown_parameter")
    if wrong["type"] == "missing":
        return bad(f"The parameter {param} is missing.", param, "missing_required_parameter")
    sentence = wrong["msg"].partition(" should ")[2] or wrong["msg"]
    return bad(f"{param} must {sentence}; got {quoted(wrong['input'])}.", param, "invalid_value")


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"
