"""Small models to serve, made once."""

import pytest
from support.served import save_served
from transformers.utils import logging

from tarnn.serving.engine import Engine
from tarnn.serving.model import open_served


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory):
    """served_folder(kind): the folder of a tiny checkpoint, of a kind in `support.served`."""
    logging.disable_progress_bar()
    folders = {}

    def folder(kind="linear"):
        if kind not in folders:
            save_served(made := tmp_path_factory.mktemp(kind), kind)
            folders[kind] = made
        return folders[kind]

    return folder


@pytest.fixture(scope="session")
def served(served_folder):
    """served(kind, weights="float32"): that model, opened."""
    models = {}

    def model(kind="linear", weights="float32"):
        if (kind, weights) not in models:
            models[kind, weights] = open_served(served_folder(kind), weights=weights)
        return models[kind, weights]

    return model


@pytest.fixture
def engine(served):
    """engine(kind, **options): a running engine, closed after the test."""
    engines = []

    def start(kind="linear", weights="float32", **options):
        engines.append(Engine(served(kind, weights), **options))
        engines[-1].start()
        return engines[-1]

    yield start
    for one in engines:
        one.close()
