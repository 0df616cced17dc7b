"""The events of a streamed response are those of the official client's types."""

import json

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tarnn.serving.http.response_events import ResponseEvents
from tarnn.serving.http.response_schemas import OutputMessage, OutputText, ResponseObject

BEGUN = ResponseObject(
    id="resp_7",
    created_at=11,
    model="m",
    previous_response_id=None,
    instructions=None,
    temperature=0.5,
    top_p=1.0,
    max_output_tokens=3,
    store=True,
    metadata={},
)
TEXTS = ["Caf", 'é "', "\n\u2028end"]


def streamed(status):
    events = ResponseEvents("msg_7")
    message = OutputMessage(id="msg_7", status="completed", content=[OutputText(text="".join(TEXTS))])
    ended = BEGUN.model_copy(update={"status": status, "output": [message]})
    body = [events.begin(BEGUN.model_dump())]
    body += [events.delta(text) for text in TEXTS]
    return [*body, events.end(ended.model_dump())]


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
def test_the_last_event_says_how_it_ended(status):
    *frames, done, nothing = b"".join(streamed(status)).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    for frame in frames:
        event, data = frame.decode().split("\n")  # two lines, whatever the text
        fields = json.loads(data.removeprefix("data: "))
        assert TypeAdapter(ResponseStreamEvent).validate_python(fields).type == event.removeprefix("event: ")
    assert event == f"event: response.{status}"
