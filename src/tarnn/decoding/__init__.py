"""What runs a model: the token loop, samplers, streaming, the fused step, state files."""
