"""The queues that take part, by name. Their order is that of tables and pictures."""

from __future__ import annotations

from .base import Fill, Lease, SQLSystem, System, payload_of
from .blocks import Blocks
from .channel_row import ChannelRow
from .fair import Fairqueue, FairqueueWithoutHistory
from .fifo import FIFO, StalledWorkers
from .limit import Limit
from .partition_by import PartitionBy
from .peers import PEERS
from .priority import Marked, Priority, PriorityAfterTime, PriorityTwoIndexes

__all__ = ["LIMIT", "OURS", "OURS_WITHOUT_HISTORY", "SYSTEMS", "Fill", "Lease", "SQLSystem", "System", "payload_of"]

OURS = Fairqueue.name
OURS_WITHOUT_HISTORY = FairqueueWithoutHistory.name
LIMIT = Limit.name

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Fairqueue(),
        Limit(),
        FIFO(),
        StalledWorkers(),
        Priority(),
        PriorityTwoIndexes(),
        PriorityAfterTime(),
        Marked(),
        ChannelRow(),
        PartitionBy(),
        Blocks(),
        *PEERS.values(),
        FairqueueWithoutHistory(),
    )
}
