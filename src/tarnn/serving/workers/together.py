"""The two sides of `tarnn serve --workers`: what starts the processes, and what each of them adds to the application."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.middleware import Middleware

from tarnn.errors import UserError
from tarnn.serving.http.settings import ServerSettings
from tarnn.serving.workers.gathered import Gathered
from tarnn.serving.workers.place import Place
from tarnn.serving.workers.routing import Routing
from tarnn.serving.workers.supervisor import Supervisor


def serve_together(
    count: int,
    listener: socket.socket,
    arguments: Sequence[str],
    *,
    states: Path | None,
    say: Callable[[str], None],
    on_ready: Callable[[], None],
) -> int:
    """Run `tarnn` with these arguments in `count` processes until a signal ends them; the exit code. Others as of `Supervisor`.

    Raises UserError on systems that don't pass connections between processes.
    """
    if os.name != "posix" or not hasattr(socket, "send_fds"):
        raise UserError(
            "--workers needs a system that passes connections between processes, such as Linux. Leave it out."
        )
    command = [sys.executable, "-m", "tarnn", *arguments]
    return Supervisor(command, count, listener, states=states, say=say, on_ready=on_ready).run()


def passed_by(place: Place, settings: ServerSettings) -> list[Middleware]:
    """What each request passes in a process that is one of several."""
    routing = Middleware(Routing, place=place, most=settings.max_body, seconds=settings.body_seconds)
    return [Middleware(Gathered, place=place), routing]
