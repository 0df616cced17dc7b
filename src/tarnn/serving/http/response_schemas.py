"""Schemas of answers. OpenAPI's document is derived from them; a test holds real answers against it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from tarnn.serving.http.request_schemas import TextField


class AnswerSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Deleted(AnswerSchema):
    id: str
    object: Literal["response", "state"]
    deleted: Literal[True] = True


class ErrorObject(AnswerSchema):
    """message: a sentence. param: the wrong parameter. code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerSchema):
    error: ErrorObject


class CachedTokens(AnswerSchema):
    cached_tokens: int


class TokenUsage(AnswerSchema):
    """prompt_tokens: all that the answer depends on; cached: those that were not read again."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


# ---- completions and chats ----


class AnswerHead(AnswerSchema):
    """Fields with which each answer for text, and each chunk of one, begins."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(AnswerSchema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChunkChoice(AnswerSchema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChoice(CompletionChunkChoice):
    finish_reason: Literal["stop", "length"]


class Completion(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(AnswerHead):
    """usage: in the last chunk, which has no choices, or in each, as stream_options say."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | None = None


class LikelyToken(AnswerSchema):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(AnswerSchema):
    content: list[ChatLogprob]
    refusal: None


class ChatMessage(AnswerSchema):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(AnswerSchema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatDelta(AnswerSchema):
    """role: in the first of a choice."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(AnswerSchema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatChunk(AnswerHead):
    """usage: as in a `CompletionChunk`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None


# ---- responses ----


class OutputText(AnswerSchema):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: list[dict[str, Any]] = []


class OutputMessage(AnswerSchema):
    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ResponseUsage(AnswerSchema):
    """input_tokens: all that the answer depends on, those of earlier responses too; cached: not read again."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int] = {"reasoning_tokens": 0}
    total_tokens: int


class ResponseObject(AnswerSchema):
    """A response. The specification requires every field; those that this server doesn't use have a constant value.

    where: "disk" if the conversation outlives the server, "memory" if it does not; None if it is not stored.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None = None
    error: dict[Literal["code", "message"], str] | None = None
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


class ResponseEvent(BaseModel):
    """The data of an event of a streamed response. Its other fields are those of the Open Responses specification."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int


# ---- states ----


class StateObject(AnswerSchema):
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
    usage: TokenUsage | None = None


class StateList(AnswerSchema):
    object: Literal["list"] = "list"
    data: list[StateObject]
    has_more: bool


class StateProgress(AnswerSchema):
    """Progress of a streamed creation: the data of an event, the last of which holds the state."""

    object: Literal["state.progress"] = "state.progress"
    tokens_read: int
    tokens: int
    state: StateObject | None = None


# ---- models and operators ----


class ModelObject(AnswerSchema):
    """max_model_len: tokens, if there is a limit. The last three are those of `Sizes`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["tarnn"] = "tarnn"
    max_model_len: int | None
    task: Literal["text"] = "text"
    chat: bool
    weights: str
    parameters: int
    fingerprint: str
    state_bytes: int
    state_bytes_per_token: int
    cache_bytes_per_token: int


class ModelList(AnswerSchema):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class TokenIds(AnswerSchema):
    tokens: list[int]
    count: int


class DecodedText(AnswerSchema):
    prompt: str


class HealthStatus(AnswerSchema):
    """trouble: a failure while requests are taken: states that can't be written to the disk."""

    status: Literal["ok", "ready"]
    trouble: str | None = None


class TarnnVersion(AnswerSchema):
    version: str


class OpenApiDocument(RootModel[dict[str, Any]]):
    pass
