"""The events of a streamed response, in the order and with the names of the Open Responses specification.

    response.created, response.in_progress, response.output_item.added, response.content_part.added,
    response.output_text.delta …, response.output_text.done, response.content_part.done, response.output_item.done,
    response.completed | response.incomplete | response.failed, [DONE]

Each carries `sequence_number`, from 0 on. A response holds one message, and that one text.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tarnn.serving.http.sse import DONE

ONLY = {"output_index": 0, "content_index": 0}


class ResponseEvents:
    """Writes the events of one response as server-sent events. message_id: of its only message."""

    def __init__(self, message_id: str):
        self._id = message_id
        self._number = 0
        beginning = {"type": "response.output_text.delta", "item_id": message_id, **ONLY}
        self._delta = json.dumps(beginning)[:-1]  # the same for all deltas, so it is written once

    def begin(self, response: dict[str, Any]) -> bytes:
        """Return the events before the first text. response: the object so far."""
        item = {"id": self._id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", item_id=self._id, **ONLY, part=part),
            )
        )

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Return the event of some more text."""
        rest = f', "delta": {json.dumps(text)}, "logprobs": {json.dumps(logprobs) if logprobs else "[]"}'
        data = f'{self._delta}{rest}, "sequence_number": {self._next()}}}'
        return f"event: response.output_text.delta\ndata: {data}\n\n".encode()

    def end(self, response: dict[str, Any]) -> bytes:
        """Return the events after the last text. response: the object, finished."""
        return b"".join(self._end(response)) + DONE

    def _end(self, response: dict[str, Any]) -> Iterator[bytes]:
        for item in response["output"]:
            [part] = item["content"]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", item_id=self._id, **ONLY, **text)
            yield self._event("response.content_part.done", item_id=self._id, **ONLY, part=part)
            yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, **fields, "sequence_number": self._next()}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number
