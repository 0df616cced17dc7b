"""Serve states: an engine runs many sequences at once, and a store keeps the state of each.

Reading and writing give the same bits (`FusedStep.prefill` is to the last bit what steps give), and a row's bits don't depend on
its neighbours. So neither load nor batching, cache hits, pauses or restarts change an answer.
"""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.serving.engine import Busy as Busy, Engine as Engine, Stats as Stats
    from tarnn.serving.model import ServedModel as ServedModel, StateKey as StateKey, open_served as open_served
    from tarnn.serving.request import (
        Event as Event,
        Request as Request,
        Sampling as Sampling,
        TokenLogprob as TokenLogprob,
        Usage as Usage,
    )
    from tarnn.serving.snapshot import Snapshot as Snapshot
    from tarnn.serving.state_info import (
        NameTaken as NameTaken,
        StateGone as StateGone,
        StateInfo as StateInfo,
        StoreFull as StoreFull,
        StoreStats as StoreStats,
        StoreTrouble as StoreTrouble,
        UnfitState as UnfitState,
        UnknownState as UnknownState,
    )
    from tarnn.serving.store import StateStore as StateStore
    from tarnn.serving.stream import Stream as Stream

__getattr__, __dir__ = lazy_names(__name__)
