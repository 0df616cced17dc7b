"""The answers of completions, chats and models as OpenAPI describes them; a test holds real answers against them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(Shape):
    """message: a sentence. param: what is wrong in the request. code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    error: ErrorObject


class CachedTokens(Shape):
    cached_tokens: int


class TokenUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Head(Shape):
    """What each answer for text begins with, and each chunk of one."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Head):
    """usage: in the last chunk, which has no choices, or in each, as stream_options say."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | None = None


class LikelyToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Shape):
    content: list[ChatLogprob]
    refusal: None


class ChatAnswer(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatDelta(Shape):
    """role: in the first of a choice."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatChunk(Head):
    """usage: as in a `CompletionChunk`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None


class ModelObject(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelObject]


class Tokens(Shape):
    tokens: list[int]
    count: int


class Text(Shape):
    prompt: str


class Status(Shape):
    status: str


class Readiness(Status):
    """trouble: what doesn't work while requests are taken: states that can't be written to the disk."""

    trouble: str | None = None


class Version(Shape):
    version: str


class AnyObject(RootModel[dict[str, Any]]):
    pass
