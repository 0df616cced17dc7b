"""Additions to transformers' Trainer: safe checkpoints, bits per byte, a budget of minutes, a log."""
