"""Names that tarnn's checkpoints carry in their config.json."""

MODEL_TYPES = ("tarnn", "tarnn_image", "tarnn_seq2seq")  # "model_type" of tarnn's own models
METHOD = "tarnn"  # "quant_method" of a converted model
CONVERTED = "tarnn_attention"  # the key under which a converted model's config describes its layers
