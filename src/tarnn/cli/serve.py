"""`tarnn serve`: models behind OpenAI's API, on this machine's loopback unless told otherwise."""

import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from tarnn.cli.formats import num_bytes, num_seconds
from tarnn.errors import UserError

Weights = Literal["float32", "bfloat16", "int8", "int4"]
PAUSED = 8  # one part in 8 of the memory for states is for texts whose readers are slow
access, states, limits = (partial(Option, rich_help_panel=heading) for heading in ("Access", "States", "Limits"))


def serve(
    runs: Annotated[
        list[Path], Argument(help="Checkpoint folders, or files of `tarnn pack`; models are called by their names.")
    ],
    weights: Annotated[
        Weights | None, Option(help="How the fused step keeps the weights: fewer bits are faster (default: as saved).")
    ] = None,
    adapter: Annotated[
        list[str] | None, Option(metavar="NAME=FOLDER", help="Serve the model with this adapter, too. May be repeated.")
    ] = None,
    state: Annotated[
        list[str] | None,
        Option(metavar="NAME=FILE", help="Serve the model from a state of `tarnn tune-state`, too. May be repeated."),
    ] = None,
    host: Annotated[str, access(help="The address; one of other machines needs keys.")] = "127.0.0.1",
    port: Annotated[int, access(min=0, max=65535, help="0 finds a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, access(help="One key a line. Each has states of its own; the first may read /metrics.")
    ] = None,
    no_auth: Annotated[bool, access("--no-auth", help="Let everybody in who reaches the address.")] = False,
    cors: Annotated[
        list[str] | None, access(help="Let pages of this origin use the server. May be repeated; *: all.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None, access(help="Believe this address or network on who asks (X-Forwarded-For). May be repeated.")
    ] = None,
    state_dir: Annotated[
        Path | None, states(help="Keep states in this folder, so that they outlive the server.")
    ] = None,
    state_memory: Annotated[
        str, states(help="Of each model's states in memory, those of texts with slow readers among them.")
    ] = "1GiB",
    state_disk: Annotated[str, states(help="Of each model's states on the disk.")] = "20GiB",
    session_ttl: Annotated[
        str | None, states(help="Drop states that were not used for so long, as 12h or 7d (default: never).")
    ] = None,
    max_rows: Annotated[int, limits(min=1, max=1024, help="Texts that are written at once.")] = 32,
    prefill_piece: Annotated[
        int, limits(min=1, max=2**16, help="Tokens of prompts that are read between two steps.")
    ] = 256,
    max_queue: Annotated[int, limits(min=1, help="Requests that wait; beyond, clients are told to come later.")] = 256,
    max_queue_tokens: Annotated[int, limits(min=1, help="Tokens of their prompts.")] = 2**20,
    threads: Annotated[int | None, limits(min=1, max=1024, help="Of the engine; default: the machine's.")] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Serve models over HTTP, to clients of OpenAI's API: completions, chat, and states that are kept.

    All requests are written together, and each answer is what its request alone would get, to the last bit. What was read
    once is not read again: states of prompts and answers are kept, and a prompt that begins as an earlier one did begins
    from its state.

    Ctrl-C finishes what runs and stops; a second one stops at once.
    """
    from tarnn.serving.http.server import Server, address_of, bind  # first: it needs what the extra brings

    adapters, first_states = named(adapter, "--adapter", runs), named(state, "--state", runs)
    names = [run.resolve().stem if run.is_file() else run.resolve().name for run in runs]
    names += [*adapters, *first_states]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"two models are called {twice[0]}; a folder goes by its own name. Rename one.")
    import torch

    from tarnn.serving.engine import Engine
    from tarnn.serving.http.app import create_app
    from tarnn.serving.http.settings import ServerSettings, answered_names, check_proxies, read_keys
    from tarnn.serving.model import open_served, served_from
    from tarnn.serving.store import StateStore

    keys = () if api_key_file is None else read_keys(api_key_file)
    if keys and no_auth:
        raise UserError("--api-key-file and --no-auth were both given; give one of them.")
    check_proxies(trusted_proxy or ())
    settings = ServerSettings(keys=keys, hosts=answered_names(host, keys, no_auth), cors=tuple(cors or ()))
    memory, disk = num_bytes(state_memory, "--state-memory"), num_bytes(state_disk, "--state-disk")
    paused = memory // PAUSED
    ttl = None if session_ttl is None else num_seconds(session_ttl, "--session-ttl")
    report = silent if quiet else partial(print, file=sys.stderr, flush=True)
    with ExitStack() as stack:
        bound = stack.enter_context(bind(host, port))
        address = address_of(bound)
        ready = f"tarnn: {address}/v1 answers, and {address} is a page to write on; Ctrl-C ends it"
        torch.set_num_threads(threads or torch.get_num_threads())
        engines = {}
        models = [open_served(run, name=name, weights=weights) for name, run in zip(names, runs)]
        models += [open_served(runs[0], name=x, weights=weights, adapter=path) for x, path in adapters.items()]
        models += [served_from(models[0], path, x) for x, path in first_states.items()]
        for name, model in zip(names, models, strict=True):
            folder = state_dir and state_dir / name
            store = StateStore(model, memory=memory - paused, folder=folder, disk=disk, ttl=ttl)
            stack.callback(store.close)
            engine = Engine(
                model,
                store=store,
                max_rows=max_rows,
                prefill_piece=prefill_piece,
                max_paused=paused,
                max_queue=max_queue,
                max_queue_tokens=max_queue_tokens,
            )
            engines[name] = stack.enter_context(engine)
            report(f"tarnn: {name}: {model.key.weights} weights, {model.key.isa}")
        app = create_app(engines, settings)

        def stop() -> None:
            for engine in engines.values():
                engine.close()

        server = Server(app, report, stop, ready=ready, trusted_proxies=trusted_proxy or ())
        server.run(sockets=[bound])


def named(given: list[str] | None, option: str, runs: list[Path]) -> dict[str, Path]:
    """Read NAME=PATH of an option that may be repeated. UserError for anything else, and with several folders."""
    pairs = [x.partition("=") for x in given or ()]
    if wrong := next((x for x, y in zip(given or (), pairs) if not (y[0] and y[2])), None):
        raise UserError(f"{option} {wrong}: expected a name for clients and a path, as {option} french=PATH.")
    if pairs and len(runs) > 1:
        raise UserError(f"{option} goes with one model, and {len(runs)} folders were given; start a server for each.")
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise UserError(f"two of {option} have the same name; give each its own.")
    return {name: Path(path) for name, _, path in pairs}


def silent(text: str) -> None:
    """Says nothing."""
