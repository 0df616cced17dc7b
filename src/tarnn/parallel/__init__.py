"""Sequences over several processes, on torch.distributed: each rank holds a stretch of every sequence."""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.parallel.agreement import check_alike as check_alike
    from tarnn.parallel.group import Ranks as Ranks, cut as cut
    from tarnn.parallel.wrapping import sequence as sequence

__getattr__, __dir__ = lazy_names(__name__)
