"""Kernels for GPUs, in Triton. Nothing here imports Triton before the first call that it computes."""
