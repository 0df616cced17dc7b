"""The models as transformers has them: the pretrained base, heads, caches, Auto classes, `generate` by the fused step."""
