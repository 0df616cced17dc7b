"""What is read when a conversation goes on from a parked state: the new messages alone.

The state has read everything up to the last answer. A chat template writes whole conversations; what it would write behind an
answer is found by giving it a short one, with a marker where the answer stands.
"""

import uuid

from tarnn.serving.http.errors import bad
from tarnn.serving.http.prompts import Ids
from tarnn.serving.http.template import Messages, encoded, marked, patterns, rendered
from tarnn.serving.model import ServedModel


def continued(model: ServedModel, messages: Messages, last: int) -> Ids:
    """What comes behind an answer: its end, the new messages, the beginning of the next answer.

    last: the token with which the answer ended; if the template ends it with the same, that is not read twice. Raises ApiError
    for a template that leaves some of it out.
    """
    marker = uuid.uuid4().hex
    earlier = {"role": "user", "content": "-"}, {"role": "assistant", "content": marker}
    text = rendered(model, [*earlier, *messages], answer_follows=True)
    _, shown, rest = text.rpartition(marker)
    if not shown:
        raise bad(
            "The model's chat template leaves earlier answers out, so no conversation can go on behind one. Send all of its "
            "messages again, without previous_response_id.",
            "previous_response_id",
        )
    check_shown(model, messages, rest)
    ids, _ = encoded(model, rest)
    return ids[1:] if len(ids) and ids[0] == last else ids


def check_shown(model: ServedModel, messages: Messages, text: str) -> None:
    """Raises ApiError for a message that the template has left out: many write a system message at the beginning only."""
    for message in messages:
        if marked(message["content"], patterns(model)[0]).strip() not in text:
            raise bad(
                f"The model's chat template has no place for a {message['role']} message behind an answer. Put it into the "
                "first request of a conversation, or into a user message.",
                "instructions" if message["role"] == "system" else "input",
            )
