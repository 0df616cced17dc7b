"""Files that have moved: importing one from its old place raises an error that names the new place."""

import sys

PLACES = {
    "tarnn.analysis.image_likelihood": "scripts.common.image_bits",
    "tarnn.analysis.softmax_error": "experiments.measures.softmax_error",
    "tarnn.data.ctc": "tarnn.tasks.speech.ctc",
    "tarnn.generation": "tarnn.decoding",
    "tarnn.models.fused": "tarnn.decoding.fused",
    "tarnn.models.fused_forward": "tarnn.huggingface.fused_forward",
    "tarnn.tasks.images.likelihood": "scripts.common.image_bits",
}


class _Moved:
    """A finder that raises for moved names. It is asked first, since an old folder may have left its cache behind."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        if name in PLACES:
            raise ModuleNotFoundError(f"{name} is {PLACES[name]} now.", name=name)


def announce() -> None:
    sys.meta_path.insert(0, _Moved)  # type: ignore[arg-type]
