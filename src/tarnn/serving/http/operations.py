"""What can be done over HTTP: each path and method, with the shapes of its body and its answer."""

import re
from dataclasses import dataclass

from pydantic import BaseModel

from tarnn.serving.http import answer_wire as answers, response_wire as responses, state_wire as states, wire

JSON, TEXT, BYTES, EVENTS = "application/json", "text/plain", "application/octet-stream", "text/event-stream"
Model = type[BaseModel]


@dataclass(frozen=True)
class Operation:
    """name: of the operation, one word. body, answer: JSON of these shapes. query: the parameters behind the path.

    events: the data of an event, where the answer may be server-sent events. other_bodies, other_answers: types beside, or
    instead of, JSON. optional: whether the body may be left out.
    """

    method: str
    path: str
    name: str
    summary: str
    body: Model | None = None
    answer: Model | None = None
    query: Model | None = None
    events: Model | None = None
    optional: bool = False
    other_bodies: tuple[str, ...] = ()
    other_answers: tuple[str, ...] = ()

    @property
    def in_path(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)


OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "complete",
        "Continue a text",
        wire.CompletionRequest,
        answers.Completion,
        events=answers.CompletionChunk,
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "chat",
        "Answer a conversation",
        wire.ChatRequest,
        answers.ChatCompletion,
        events=answers.ChatChunk,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "respond",
        "Answer, and remember the conversation as a state",
        responses.ResponseRequest,
        responses.ResponseObject,
        events=responses.ResponseEvent,
    ),
    Operation("GET", "/v1/responses/{id}", "getResponse", "A response", answer=responses.ResponseObject),
    Operation("DELETE", "/v1/responses/{id}", "deleteResponse", "Forget a response", answer=responses.DeletedResponse),
    Operation(
        "POST",
        "/v1/states",
        "createState",
        "Read a text into a state, or take the file of one",
        states.StateRequest,
        states.StateObject,
        states.StateQuery,
        events=states.StateProgress,
        other_bodies=(TEXT, BYTES),
    ),
    Operation("GET", "/v1/states", "listStates", "All states", answer=states.StateList, query=states.ListQuery),
    Operation("GET", "/v1/states/{id}", "getState", "A state, by its id or its name", answer=states.StateObject),
    Operation("DELETE", "/v1/states/{id}", "deleteState", "Forget a state", answer=states.DeletedState),
    Operation(
        "POST",
        "/v1/states/{id}/fork",
        "forkState",
        "Another state that is the same",
        states.ForkRequest,
        states.StateObject,
        optional=True,
    ),
    Operation("GET", "/v1/states/{id}/file", "downloadState", "The file of a state", other_answers=(BYTES,)),
    Operation(
        "PUT",
        "/v1/states/{id}/file",
        "uploadState",
        "Take the file of a state, under this name",
        answer=states.StateObject,
        query=states.ModelQuery,
        other_bodies=(BYTES,),
    ),
    Operation("GET", "/v1/models", "listModels", "The models", answer=answers.ModelList),
    Operation("GET", "/v1/models/{name}", "getModel", "A model", answer=answers.ModelObject),
    Operation("POST", "/tokenize", "tokenize", "The tokens of a text", wire.TokenizeRequest, answers.Tokens),
    Operation("POST", "/detokenize", "detokenize", "The text of tokens", wire.DetokenizeRequest, answers.Text),
    Operation("GET", "/health", "health", "Whether the server lives", answer=answers.Status),
    Operation("GET", "/ready", "ready", "Whether the server takes requests", answer=answers.Readiness),
    Operation("GET", "/version", "version", "The version of tarnn", answer=answers.Version),
    Operation("GET", "/metrics", "metrics", "Numbers for Prometheus", other_answers=(TEXT,)),
    Operation("GET", "/openapi.json", "openapi", "This description", answer=answers.AnyObject),
)
