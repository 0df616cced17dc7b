"""The format "web": a folder for any static host, whose page runs the model in the browser, without a server or a network.

model.tarnn     the packed model                    tarnn.wasm     csrc/runtime for WebAssembly (scripts/wasm/build.sh)
about.json      facts that the pages show           tarnn.js       its interface: load, read, generate, states
index.html, …   for texts endless.html and fork.html, for images digits.html; page.css and page.js are theirs
"""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

from tarnn.decoding.from_program import open_folder
from tarnn.decoding.opened import Opened
from tarnn.decoding.pack import facts_of, pack_folder
from tarnn.decoding.packed_file import read_packed, write_packed
from tarnn.decoding.refusal import Refusal
from tarnn.decoding.tokenizer import FILE as TOKENIZER
from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.own.text import checked
from tarnn.json_file import read_json
from tarnn.log import Log
from tarnn.models.images import START, ImageModelConfig
from tarnn.models.likelihoods import Categorical
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import Runtime, Unavailable

PAGES = Path(__file__).with_name("pages")
RUNTIME = "tarnn.wasm"
SHARED = (RUNTIME, "tarnn.js", "page.js", "page.css")
MODEL, ABOUT = "model.tarnn", "about.json"
MOST = 2**31  # bytes of a model: a page of 32 bits has memory for it and its states
IMAGES = "TarnnForImageGeneration"
READ = {  # what tokenizer.json may have in each place
    "model": ("BPE",),
    "normalizer": (None,),
    "pre_tokenizer": ("ByteLevel",),
    "post_processor": (None, "ByteLevel", "TemplateProcessing"),
    "decoder": ("ByteLevel",),
}
NOT_READ = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


def export(source: Path, out: Path, *, report: Log, weights: str = "int8") -> str:
    """Write the folder of a page into the empty folder `out`; return its size, and how to see it.

    weights: float32 | bfloat16 | int8 | int4. Raises UserError for a model that can't be packed, or drawn in a browser, and
    where this tarnn was built without `tarnn.wasm`.
    """
    if not (PAGES / RUNTIME).is_file():
        raise UserError(
            f"this tarnn was built without {RUNTIME}, so it can't write pages. Build it in a checkout, by scripts/wasm/build.sh."
        )
    config = Config.read(source)
    image = image_of(config, source) if IMAGES in (config.get("architectures") or ()) else None
    if image is None:
        check_tokenizer(source)
        pack_folder(source, out / MODEL, weights, report=report)
        pages = {"endless.html": "index.html", "fork.html": "fork.html"}
    else:
        pack_images(source, out / MODEL, weights)
        pages = {"digits.html": "index.html"}
    size = (out / MODEL).stat().st_size
    if size > MOST:
        raise UserError(
            f"{source} has {size:,} bytes, and a browser takes at most {MOST:,}. Take fewer bits: --weights int4."
        )
    (out / ABOUT).write_text(json.dumps(about(out / MODEL, size, image), indent=1))
    for name, to in {**{x: x for x in SHARED}, **pages}.items():
        shutil.copy(PAGES / name, out / to)
    total = sum(x.stat().st_size for x in out.iterdir())
    return f"{total:,} bytes; put the folder on any server of files, or look at it by `python -m http.server --directory FOLDER`"


def about(model: Path, size: int, image: dict[str, int] | None) -> dict[str, Any]:
    """Return the facts that the pages show. states: in the order in which a saved state has their numbers, of four bytes each."""
    facts = read_packed(model).facts
    states = [
        {"layer": layer, "name": name, "shape": shape, "numbers": prod(shape) * (2 if dtype == "int64" else 1)}
        for layer, _, name, shape, dtype, _, _ in facts["outline"]["states"]
    ]
    told = {name: facts[name] for name in ("weights", "parameters", "key_bytes")}
    return {**told, "bytes": size, "states": states, "image": image}


def check_tokenizer(source: Path) -> None:
    """Raise UserError for a tokenizer that tarnn.wasm does not read (csrc/runtime/tokenizer.cpp), with what it has."""
    if not (source / TOKENIZER).is_file():
        return
    saved = read_json(source / TOKENIZER)
    kinds = {name: (saved.get(name) or {}).get("type") for name in READ}
    others = [f"{name} {kind}" for name, kind in kinds.items() if kind not in READ[name]]
    others += [f"the added token {x['content']}" for x in saved.get("added_tokens", ()) if not x["special"]]
    others += [name for name in NOT_READ if saved["model"].get(name)]
    if others:
        raise UserError(
            f"{source} has a tokenizer that a page does not read: {others[0]}. Pages read those of tarnn: bytes, letters and "
            "byte-level BPE; `tarnn pack` writes the model for `tarnn-run --ids`."
        )


def image_of(config: Config, source: Path) -> dict[str, int]:
    """Return the size of a model's images. Raises UserError for those that the page can't draw, with the reason."""
    record = checked(config, ImageModelConfig, IMAGES)
    why = None
    if record.num_classes:
        why = "draws images of given classes"
    elif not isinstance(record.make_likelihood(), Categorical):
        why = f"has values of likelihood={record.likelihood!r}"
    elif record.num_channels != 1:
        why = f"has {record.num_channels} channels"
    if why:
        raise UserError(
            f"{source} {why}; the page draws grey images value by value: `tarnn train IMAGES --task image --likelihood "
            "categorical`."
        )
    return {"height": record.image_height, "width": record.image_width, "start_token": START}


def pack_images(source: Path, file: Path, weights: str) -> None:
    """Write a model of images as a packed file, whose tokens are values. Raises UserError where it does not run compiled."""
    try:
        opened: Opened = open_folder(source, weights)
        if not isinstance(opened.step, Runtime):
            raise Refusal("; ".join(opened.about))
    except (Refusal, Unavailable, ProgramError) as error:
        raise UserError(f"{source} can't be packed: {error}") from error
    write_packed(file, opened.step.packed, facts_of(opened, opened.step), {})
