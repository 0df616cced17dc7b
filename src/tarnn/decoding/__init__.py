"""Run a model: the token loop, samplers, streaming, the fused step, state files."""

from tarnn.decoding.choice import fastest_step as fastest_step
