"""Why there is no fused step: the errors that say so."""


class Refusal(ValueError):
    """Why a model has no fused step: one sentence, without its full stop. The one that `FusedStep` raises has it as its cause."""


class OldKernels(Refusal):
    """The compiled kernels are of another version than this package: they would have to be compiled again."""
