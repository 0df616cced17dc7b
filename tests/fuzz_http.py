"""Ask a server for everything that its OpenAPI document offers, for as long as you like.

    python tests/fuzz_http.py --count 300 --seed 1 [--only /v1/states]

The suite does the same with a few requests of each kind (serving/http/test_openapi.py).
"""

import argparse
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hypothesis.errors import Unsatisfiable
from schemathesis.generation.modes import GenerationMode
from support.http_server import http_server
from support.schema_fuzz import ask, operations
from support.served import save_served

from tarnn.serving.http.settings import ServerSettings
from tarnn.serving.model import open_served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="requests of each operation, right and wrong ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="operations with this in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("linear", "decay"):
            save_served(Path(folder) / kind, kind)
        models = {kind: open_served(Path(folder) / kind) for kind in ("linear", "decay")}
        with http_server(models, ServerSettings(max_prompt=200, max_choices=4)) as server:
            for label, operation in operations(server.url).items():
                if options.only in label:
                    since = time.time()
                    for mode in GenerationMode:
                        with suppress(Unsatisfiable):  # of what takes nothing, nothing can be wrong
                            ask(operation, mode, options.count, options.seed)
                    print(f"{label}: {time.time() - since:.1f} s", flush=True)


if __name__ == "__main__":
    main()
