"""The queues from package registries, by name: those that try to be fair first, then the others, then workers."""

from __future__ import annotations

from .awa_peer import Awa
from .base import Peer, Working
from .chancy_peer import Chancy
from .dbos_peer import DBOS
from .oban_peer import Oban
from .own import FairqueueWorker, FairqueueWorkerDefault
from .pgboss import PgBoss, PgBossGroups
from .pgmq_peer import PGMQ, PGMQGroupedRR
from .pgqueuer_peer import PgQueuer
from .procrastinate_peer import Procrastinate, ProcrastinateLock

__all__ = ["OUR_DEFAULT_WORKER", "OUR_WORKER", "PEERS", "Peer", "Working"]

OUR_WORKER = FairqueueWorker.name
OUR_DEFAULT_WORKER = FairqueueWorkerDefault.name

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        PGMQGroupedRR(),
        ProcrastinateLock(),
        PgBossGroups(),
        PGMQ(),
        PgQueuer(),
        Procrastinate(),
        PgBoss(),
        FairqueueWorker(),
        FairqueueWorkerDefault(),
        DBOS(),
        Chancy(),
        Awa(),
        Oban(),
    )
}
