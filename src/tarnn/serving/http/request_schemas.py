"""Schemas of requests: which parameters there are, and in which range. OpenAPI's document is derived from them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MOST_STOPS = 4
MOST_LOGPROBS = 20
MOST_LISTED = 1000  # states: more would hold the loop up
LONGEST_STOP = 1000  # characters

# parameters of OpenAI's API that are not here, and why
TOOLS = "Tools are not supported: the models served here were not trained to call them."
FUNCTIONS = "Functions are not supported: the models served here were not trained to call them."
REFUSED = {
    "tools": TOOLS,
    "tool_choice": TOOLS,
    "parallel_tool_calls": TOOLS,
    "functions": FUNCTIONS,
    "function_call": FUNCTIONS,
    "response_format": "response_format is not supported: answers are not held to a grammar. Ask for the format in the prompt.",
    "best_of": "best_of is not supported: ask for n choices with logprobs and take the best yourself.",
    "suffix": "suffix is not supported: the models served here continue a text and don't fill a gap in it.",
}
IMAGES = "Images are not supported: the models served here read text alone. Leave them out of the messages."
SOUNDS = "Sounds are not supported: the models served here read text alone. Leave them out of the messages."
NOT_TEXT = {
    **dict.fromkeys(("image_url", "input_image", "image", "video_url", "input_video"), IMAGES),
    **dict.fromkeys(("input_audio", "audio_url"), SOUNDS),
    **dict.fromkeys(("file", "input_file"), "Files are not supported: write their text into the message."),
}
REFUSED_BY_RESPONSES = {
    "tools": TOOLS,
    "tool_choice": TOOLS,
    "max_tool_calls": TOOLS,
    "text": "Only text.format.type = text is supported: answers are not held to a grammar. Ask for the format in the prompt.",
    "reasoning": "Reasoning is not supported: the models served here write their answer and nothing else.",
    "background": "Background responses are not supported: stream the answer, or wait for it.",
    "conversation": "Conversations are not supported: name the answer before in previous_response_id, or a state in state.",
    "prompt": "Prompt templates are not supported: write the text into input.",
    "truncation": "Only truncation = disabled is supported: the state of a model has read everything, and nothing is cut.",
    "include": "Only message.output_text.logprobs can be included.",
    "n": "A response has one text. /v1/completions and /v1/chat/completions write several.",
    "max_tokens": "A response takes max_output_tokens in place of max_tokens.",
}


class RequestSchema(BaseModel):
    """A request's parameters. Unknown ones are errors, so that no misspelt one is ignored.

    refused: parameters that others have, or values of them, and why they are refused here.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
    refused: ClassVar[Mapping[str, str]] = {}


def one_or_many(value: Any) -> Any:
    """Return a list of one for a single string."""
    return [value] if isinstance(value, str) else value


Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]  # a list of which the first wrong item is the only error
Refused = Annotated[None, Field(exclude=True)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
ManyStops = Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)]
Stops = Annotated[ManyStops, BeforeValidator(one_or_many, json_schema_input_type=Stop | ManyStops)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}  # `prompts.ids_of` checks them
SOME_TOKENS = TOKENS | {"minItems": 1}
PROMPT = {  # `prompts.split` checks it: a union of models would list, for a wrong one, what each member lacks
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        SOME_TOKENS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": SOME_TOKENS, "minItems": 1},
    ]
}


class StreamOptions(RequestSchema):
    """continuous_usage_stats: usage so far in every chunk, not only in the last one; load tools ask for it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextRequest(RequestSchema):
    """Parameters of all requests for text. None, as a missing parameter, is the default."""

    model: str | None = None
    state: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool | None = None
    user: str | None = None


class ChoicesRequest(TextRequest):
    """Parameters that completions and chats share, and responses lack."""

    refused: ClassVar[Mapping[str, str]] = REFUSED

    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: Refused = None
    suffix: Refused = None
    response_format: Refused = None
    tools: Refused = None


class CompletionRequest(ChoicesRequest):
    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


def plain_message(role: str, content: str | list[Any]) -> dict[str, str]:
    """Return a message as a chat template takes it: content in one text, the role "developer" by its older name."""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": "system" if role == "developer" else role, "content": text}


def only_text(kind: Any) -> Any:
    """Refuse parts of a message that are no text, by the names that OpenAI's API has for them."""
    if isinstance(kind, str) and kind in NOT_TEXT:
        raise PydanticCustomError("not_text", "{sentence}", {"sentence": NOT_TEXT[kind]})
    return kind


class ContentPart(RequestSchema):
    """A piece of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(only_text)]
    text: str


class Message(RequestSchema):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Several[ContentPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        plain = plain_message(self.role, self.content)
        return plain if self.name is None else plain | {"name": self.name}


class ChatRequest(ChoicesRequest):
    messages: Annotated[Several[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tool_choice: Refused = None
    parallel_tool_calls: Refused = None
    functions: Refused = None
    function_call: Refused = None


class InputText(RequestSchema):
    """A piece of a message: a person's text, or an earlier output that is sent again."""

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(only_text)]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(RequestSchema):
    """One message. `id` and `status` stand in messages that were output once; they are ignored."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[InputText]
    id: str | None = None
    status: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        return plain_message(self.role, self.content)


class TextFormat(RequestSchema):
    type: Literal["text"] = "text"


class TextField(RequestSchema):
    format: TextFormat = TextFormat()


class ResponseRequest(TextRequest):
    """A text to continue, or messages to answer. Parameters with one possible value only confirm the default."""

    refused: ClassVar[Mapping[str, str]] = REFUSED_BY_RESPONSES

    input: str | Annotated[Several[InputMessage], Field(min_length=1)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: Several[Literal["message.output_text.logprobs"]] | None = None
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class TokenizeRequest(RequestSchema):
    model: str | None = None
    prompt: str


class DetokenizeRequest(RequestSchema):
    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(TOKENS)]


class StateRequest(RequestSchema):
    """A text to read: one of text, tokens and messages, after `state` if that names one. The new state gets an id."""

    model: str | None = None
    text: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"anyOf": [SOME_TOKENS, {"type": "null"}]})] = None
    messages: Annotated[Several[Message], Field(min_length=1)] | None = None
    state: str | None = None
    name: Name | None = None
    stream: bool | None = None


class ForkRequest(RequestSchema):
    name: Name | None = None


class ModelQuery(RequestSchema):
    model: str | None = None


class ListQuery(ModelQuery):
    """after: the last state of the previous page."""

    limit: Annotated[int, Field(ge=1, le=MOST_LISTED)] | None = None
    after: str | None = None


class UploadQuery(ModelQuery):
    name: Name | None = None


class StateQuery(UploadQuery):
    """Parameters of a text that is a body of its own."""

    state: str | None = None
    stream: bool | None = None
