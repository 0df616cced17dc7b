"""The models as transformers has them: the pretrained base, heads, caches, Auto classes, `generate` by the fused step."""

from tarnn.extras import needed_for

with needed_for("tarnn.huggingface"):
    from tarnn.huggingface.versions import check_version

check_version()
