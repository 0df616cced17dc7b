"""Families of models: one file each, from a folder's config and weights to a program. No transformers, no torch.nn."""
