"""Functions that damage a checkpoint's folder, for the commands that must refuse it in one sentence."""

import json
import os
import struct

import torch
from safetensors.torch import load_file, save_file


def sets(file, *keys, **fields):
    """Changes fields of a JSON file; nested ones by their path."""

    def damage(folder):
        whole = json.loads((folder / file).read_text())
        part = whole
        for key in keys:
            part = part[key]
        part.update(fields)
        (folder / file).write_text(json.dumps(whole))

    return damage


def writes(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def removes(file):
    return lambda folder: (folder / file).unlink()


def weights(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def cut(file, share=0.5):
    def damage(folder):
        os.truncate(folder / file, int((folder / file).stat().st_size * share))

    return damage


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def terabyte(folder):
    size = 10**12
    part = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": part}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(folder / "model.safetensors", 8 + len(header) + size)


def a_folder(file):
    return lambda folder: ((folder / file).unlink(), (folder / file).mkdir())


def index(found):
    def damage(folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(found))

    return damage
