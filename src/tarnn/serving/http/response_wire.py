"""The bodies of /v1/responses: what is asked, and the response as clients and the store of responses see it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, RootModel

from tarnn.serving.http.wire import MOST_LOGPROBS, Sampled, Several, Wire, plain_message

Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


REFUSED = {  # parameters of OpenAI's API that are not here, and why
    "tools": "Tools are not supported: the models served here were not trained to call them.",
    "tool_choice": "Tools are not supported: the models served here were not trained to call them.",
    "max_tool_calls": "Tools are not supported: the models served here were not trained to call them.",
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


class InputText(Wire):
    """A piece of a message: what a person wrote, or what came back as output and is sent again."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Wire):
    """One message. `id` and `status` stand in messages that were output once; they are not looked at."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[InputText]
    id: str | None = None
    status: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        return plain_message(self.role, self.content)


class TextFormat(Wire):
    type: Literal["text"] = "text"


class TextField(Wire):
    format: TextFormat = TextFormat()


class ResponseRequest(Sampled):
    """A text to continue, or messages to answer. Parameters that may have one value only say what is so anyway."""

    refused: ClassVar[dict[str, str]] = REFUSED

    input: str | Annotated[Several[InputMessage], Field(min_length=1)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
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


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: list[dict[str, Any]] = []


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """input_tokens: all that the answer depends on, what was read by earlier responses too; cached: not read again."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponseObject(BaseModel):
    """A response. What this server has no use for has the value that says so; the specification requires it to be there.

    where: "disk" where the conversation outlives the server, "memory" where it does not; None where it is not stored.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    incomplete_details: IncompleteDetails | None = None
    error: ResponseFailure | None = None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[OutputMessage] = []
    usage: ResponseUsage | None = None
    temperature: float
    top_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    max_output_tokens: int | None
    store: bool
    where: Literal["disk", "memory"] | None = None
    metadata: dict[str, str]
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    text: TextField = TextField()
    tools: list[Any] = []
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: bool = False
    max_tool_calls: int | None = None
    truncation: Literal["disabled"] = "disabled"
    reasoning: None = None
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class NumberedEvent(BaseModel):
    """sequence_number: from 0 on."""

    sequence_number: int


class StatusEvent(NumberedEvent):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class ItemEvent(NumberedEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Literal[0]
    item: OutputMessage


class TextEvent(NumberedEvent):
    item_id: str
    output_index: Literal[0]
    content_index: Literal[0]


class PartEvent(TextEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class DeltaEvent(TextEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[dict[str, Any]]


class DoneEvent(TextEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[dict[str, Any]]


class ResponseEvent(RootModel[StatusEvent | ItemEvent | PartEvent | DeltaEvent | DoneEvent]):
    """The data of an event of a streamed response."""
