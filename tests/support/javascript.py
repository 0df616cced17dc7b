"""tarnn.js in node: a body of a function, which finds `load`, `bytes(path)` and `open(path)`, and returns JSON's data."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tarnn.export.web import PAGES, RUNTIME

WASM = PAGES / RUNTIME
MISSING = "no node, or no tarnn.wasm (scripts/wasm/build.sh makes it)"
AROUND = """
import fs from "node:fs";
const {{ load }} = await import({script});
const bytes = (path) => new Uint8Array(fs.readFileSync(path));
const open = (path) => load(bytes(path), {{ runtime: bytes({wasm}) }});
const result = await (async () => {{ {body} }})();
console.log(JSON.stringify(result));
"""


def is_there() -> bool:
    return bool(shutil.which("node")) and WASM.is_file()


def run(body: str, *, script: Path = PAGES / "tarnn.js") -> Any:
    text = AROUND.format(script=json.dumps(script.as_uri()), wasm=json.dumps(str(WASM)), body=body)
    done = subprocess.run(
        ["node", "--input-type=module", "-e", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def fails(body: str) -> str:
    """Return the sentence of the Error that the body throws."""
    return str(run(f"try {{ await (async () => {{ {body} }})(); return '' }} catch (error) {{ return error.message }}"))
