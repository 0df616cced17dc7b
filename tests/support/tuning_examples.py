"""An example to tune on whose tokens count up from 0."""

import json

import numpy as np

from tarnn.tuning.examples import Example


def example(length, first=0, whole=True):
    """first: the first token that is learned."""
    ids = np.arange(length)
    return Example(ids, ids >= first, whole)


def losses(out):
    """Of each step that a run's log has."""
    return [x["loss"] for x in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "loss" in x]
