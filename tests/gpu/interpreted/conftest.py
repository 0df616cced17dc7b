"""flash-linear-attention's kernels, run by the honest interpreter."""

from support import fla, honest_interpreter

fla.installed()  # before there seems to be a GPU, whose name it would ask for
honest_interpreter.install()
