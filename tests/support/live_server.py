"""An ASGI application on a socket of its own, in a thread."""

import threading
import time
from contextlib import contextmanager

import uvicorn


@contextmanager
def running(app, **options):
    """The app on a free port; its address. options: of uvicorn."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
