"""The compiled kernels for CPUs (csrc/): a file for each op that has them, and the library that they are in."""
