"""Keys of a config that change no number of inference, whatever the family: names, training, what is returned."""

from typing import Any

HARMLESS = (  # patterns of keys
    # names and versions
    "_name_or_path",
    "architectures",
    "model_type",
    "name_or_path",
    "transformers_version",
    "_attn_implementation_autoset",
    "_commit_hash",
    "unsloth_*",
    # the type of the weights: the files say it
    "dtype",
    "torch_dtype",
    # tokens, and labels of classifiers
    "*_token_id",
    "*_token_ids",
    "id2label",
    "label2id",
    "num_labels",
    "prefix",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    # training
    "*dropout*",
    "*_pdrop",
    "initializer_*",
    "init_std",
    "router_aux_loss_coef",
    "gradient_checkpointing",
    # the amount of memory, and what is returned
    "chunk_size_feed_forward",
    "output_*",
    "return_dict",
    "torchscript",
    "use_cache",
    "cache_implementation",
    # the longest context in training: no bound of the model, no number
    "max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    "pretraining_tp",
    # defaults of sampling, which older versions wrote here
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_*",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "tf_legacy_loss",
    "use_bfloat16",
)
HARMLESS_VALUES: dict[str, Any] = {  # keys that change nothing as long as they have this value
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
OF_COMPOSITES = (  # beside text_config: how images and sounds are read, which the text model does not do
    "*audio*",
    "*image*",
    "*patch*",
    "*projector*",
    "*video*",
    "*vision*",
    "downsample_factor",
    "tie_word_embeddings",
)
