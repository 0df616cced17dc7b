"""Every op in plain PyTorch, on any device: the backend that is always there, and takes every call."""
