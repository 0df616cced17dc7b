"""tarnn's own models of images, folders of `TarnnForImageGeneration`: a program over the values of an image."""

from tarnn.families.config import Config
from tarnn.families.own.blocks import blocks
from tarnn.families.own.text import checked, embed, embedding_width, refused
from tarnn.families.weights import Weights
from tarnn.models.images import ImageModelConfig
from tarnn.program.instructions import Program
from tarnn.program.recording import Recorder


def program(config: Config, weights: Weights) -> Program:
    """Record a model of images, whose outputs are the parameters of a value's distribution.

    The rows, columns and channels of a grid are places. A class is a row that each call brings.
    """
    record = checked(config, ImageModelConfig, "TarnnForImageGeneration")
    width, places, classes = embedding_width(record), None, None
    sizes = {"rows": record.image_height, "columns": record.image_width, "channels": record.num_channels}
    if record.position == "grid":
        tables = (weights.get(f"embed_{name}.weight", (size, width)) for name, size in sizes.items())
        rows, columns, channels = (x.double() for x in tables)
        places = (rows[:, None, None] + columns[:, None] + channels).flatten(0, 2)
    if record.num_classes:
        classes = weights.get("embed_classes.weight", (record.num_classes, width))
    try:
        recorder = Recorder(record.sequence_length, vocab_size=record.vocab_size, image=tuple(sizes.values()))
        tokens = weights.get("model.embed_tokens.weight", (record.vocab_size, width))
        x = embed(recorder, record, weights.under("model."), tokens, places, classes)
        x = blocks(x, record, weights.under("model."))
    except ValueError as error:
        raise refused(config, error) from error
    shape = (record.make_likelihood().num_parameters, record.hidden_size)
    head, bias = weights.get("head.weight", shape), weights.get("head.bias", shape[:1])
    weights.check_all_taken()
    return recorder.head(x, head, bias)
