"""The kernels of flash-linear-attention on GPUs: the arguments that they take, and the calls that they can't compute."""
