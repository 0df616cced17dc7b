"""Where the files are now that docs once showed elsewhere: importing one from its old place says so."""

import sys

PLACES = {
    "tarnn.generation": "tarnn.decoding",
    "tarnn.models.base_keys": "tarnn.huggingface.config_keys",
    "tarnn.models.choices": "tarnn.models.build_layers",
    "tarnn.models.configuration": "tarnn.huggingface.config",
    "tarnn.models.folders": "tarnn.huggingface.folders",
    "tarnn.models.fused": "tarnn.decoding.fused",
    "tarnn.models.fused_forward": "tarnn.huggingface.fused_forward",
    "tarnn.models.image_configuration": "tarnn.huggingface.image_config",
    "tarnn.models.recurrent": "tarnn.models.backbone",
    "tarnn.models.seq2seq_configuration": "tarnn.huggingface.seq2seq_config",
    "tarnn.models.unfilled": "tarnn.models.meta_device",
    "tarnn.ops.hybrid_state": "tarnn.ops.hybrid.state",
}


class _Moved:
    """A finder that finds nothing, but knows where to look. It is asked first: an old folder may have left its cache behind."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        if name in PLACES:
            raise ModuleNotFoundError(f"{name} is {PLACES[name]} now.", name=name)


def announce() -> None:
    sys.meta_path.insert(0, _Moved)  # type: ignore[arg-type]
