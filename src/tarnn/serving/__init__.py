"""States that are served: an engine that runs many sequences at once, and a store that keeps where each of them stands.

Reading and writing give the same bits (`FusedStep.prefill` is to the last bit what steps give), and a row's bits don't depend on
its neighbours. So neither load nor batching, cache hits, parking or restarts change an answer.
"""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.serving.engine import Busy, Engine, Stats
    from tarnn.serving.model import ServedModel, StateKey, open_served
    from tarnn.serving.request import Event, Request, Sampling, TokenLogprob, Usage
    from tarnn.serving.snapshot import Snapshot
    from tarnn.serving.stream import Stream

__getattr__, __dir__ = lazy_names(__name__)
