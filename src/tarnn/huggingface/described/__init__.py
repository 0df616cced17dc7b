"""What the fused step is told of transformers' modules, a file for each family."""
