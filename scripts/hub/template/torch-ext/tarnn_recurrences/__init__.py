"""Delta rule, short convolution, diagonal and selective scan on CPUs, forward and backward; and a step of each."""

from .ops.convolution.op import short_convolution, short_convolution_step
from .ops.delta.op import delta_rule, delta_step
from .ops.scan.op import diagonal_scan, diagonal_scan_step, selective_scan, selective_scan_step
from .ops.states import ConvolutionState, DeltaState, ScanState

__all__ = [
    "ConvolutionState",
    "DeltaState",
    "ScanState",
    "delta_rule",
    "delta_step",
    "diagonal_scan",
    "diagonal_scan_step",
    "selective_scan",
    "selective_scan_step",
    "short_convolution",
    "short_convolution_step",
]
