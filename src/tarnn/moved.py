"""Files that have moved: importing one from its old place raises an error that names the new place."""

import sys

PLACES = {
    "tarnn.analysis.compressors": "tarnn.cli.compressors",
    "tarnn.analysis.decode_cost": "scripts.common.decode_cost",
    "tarnn.analysis.image_likelihood": "tarnn.tasks.images.likelihood",
    "tarnn.analysis.residues": "experiments.measures.residues",
    "tarnn.analysis.softmax_error": "experiments.measures.softmax_error",
    "tarnn.conversion.checkpoints": "tarnn.conversion.rows",
    "tarnn.conversion.fit": "tarnn.conversion.distil_trainer",
    "tarnn.conversion.loading": "tarnn.conversion.hf_quantizer_hook",
    "tarnn.conversion.pretrained": "tarnn.conversion.convert",
    "tarnn.conversion.watching": "tarnn.conversion.capture",
    "tarnn.data.audio": "tarnn.tasks.speech.audio",
    "tarnn.data.corpus": "tarnn.tasks.text.corpus",
    "tarnn.data.ctc": "tarnn.tasks.speech.ctc",
    "tarnn.data.image_batches": "tarnn.tasks.images.batches",
    "tarnn.data.image_files": "tarnn.tasks.images.files",
    "tarnn.data.image_grid": "tarnn.tasks.images.grid",
    "tarnn.data.images": "tarnn.tasks.images.sources",
    "tarnn.data.masking": "tarnn.tasks.text.masking",
    "tarnn.data.transcripts": "tarnn.tasks.speech.transcripts",
    "tarnn.data.windows": "tarnn.tasks.text.windows",
    "tarnn.feature_maps.spread": "tarnn.feature_maps.statistics",
    "tarnn.decoding.decode_cost": "scripts.common.decode_cost",
    "tarnn.decoding.recorded": "tarnn.decoding.cuda_graph",
    "tarnn.generation": "tarnn.decoding",
    "tarnn.models.base_keys": "tarnn.huggingface.config_keys",
    "tarnn.models.choices": "tarnn.models.build_layers",
    "tarnn.models.configuration": "tarnn.huggingface.config",
    "tarnn.models.folders": "tarnn.huggingface.folders",
    "tarnn.kernels.backends": "tarnn.kernels.contract",
    "tarnn.kernels.call": "tarnn.kernels.linear",
    "tarnn.kernels.cpu.stack": "tarnn.kernels.cpu.model_step",
    "tarnn.kernels.triton.first_call": "tarnn.kernels.triton.precompile",
    "tarnn.kernels.triton.kinds": "tarnn.kernels.triton.launch_failures",
    "tarnn.kernels.triton.machine": "tarnn.kernels.triton.device",
    "tarnn.kernels.triton.parts": "tarnn.kernels.triton.split_backward",
    "tarnn.kernels.triton.rows": "tarnn.kernels.triton.strides",
    "tarnn.kernels.triton.stretches": "tarnn.kernels.triton.schedule",
    "tarnn.models.fused": "tarnn.decoding.fused",
    "tarnn.models.fused_forward": "tarnn.huggingface.fused_forward",
    "tarnn.models.image_configuration": "tarnn.huggingface.image_config",
    "tarnn.models.recurrent": "tarnn.models.backbone",
    "tarnn.models.seq2seq_configuration": "tarnn.huggingface.seq2seq_config",
    "tarnn.models.unfilled": "tarnn.models.meta_device",
    "tarnn.ops.hybrid_state": "tarnn.ops.hybrid.state",
    "tarnn.ops.reference": "tarnn.ops.linear.definition",
    "tarnn.ops.room": "tarnn.large_pages",
    "tarnn.ops.units": "tarnn.units",
    "tarnn.tasks.classification": "tarnn.tasks.labels.task",
    "tarnn.tasks.ctc": "tarnn.tasks.speech.task",
    "tarnn.tasks.masked_lm": "tarnn.tasks.text.masked",
    "tarnn.tasks.seq2seq": "tarnn.tasks.pairs.task",
    "tarnn.tasks.token_classification": "tarnn.tasks.labels.words",
    "tarnn.training.failures": "tarnn.training.error_messages",
}


class _Moved:
    """A finder that raises for moved names. It is asked first, since an old folder may have left its cache behind."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        if name in PLACES:
            raise ModuleNotFoundError(f"{name} is {PLACES[name]} now.", name=name)


def announce() -> None:
    sys.meta_path.insert(0, _Moved)  # type: ignore[arg-type]
