"""What the database says after a run: how long each file waited, and whether each was done exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from statistics import median

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from .load import NOISY
from .queues import QUEUES
from .tables import Result, Upload


@dataclass(frozen=True)
class Tenant:
    """How one tenant fared in one run. A wait is from a file's upload to its result, in seconds."""

    name: str
    #: 1 + how many files went to workers between the tenant's first upload and its first file's turn.
    place: int
    #: Until its first result.
    first: float
    waits: list[float] = field(repr=False)

    @property
    def median(self) -> float:
        return median(self.waits)

    @property
    def worst(self) -> float:
        return max(self.waits)


@dataclass(frozen=True)
class Quiet:
    """The quiet tenants of a run taken together."""

    tenants: list[Tenant]

    @property
    def place(self) -> float:
        return median(tenant.place for tenant in self.tenants)

    @property
    def first(self) -> float:
        return median(tenant.first for tenant in self.tenants)

    @property
    def median(self) -> float:
        return median(wait for tenant in self.tenants for wait in tenant.waits)

    @property
    def worst(self) -> float:
        return max(tenant.worst for tenant in self.tenants)


@dataclass(frozen=True)
class Count:
    """The proof: uploads and results of a run, compared file by file."""

    uploads: int
    results: int
    lost: int
    twice: int
    left: int

    @property
    def exact(self) -> bool:
        return self.uploads == self.results and not (self.lost or self.twice or self.left)


@dataclass(frozen=True)
class Totals:
    """What the work of a run came to."""

    size: int
    nodes: int
    functions: int
    broken: int
    unreadable: int


@dataclass(frozen=True)
class Figures:
    """One run."""

    noisy: Tenant
    quiet: Quiet
    count: Count
    totals: Totals

    @property
    def tenants(self) -> list[Tenant]:
        return [self.noisy, *self.quiet.tenants]


def measure(engine: Engine, run: str) -> Figures:
    with Session(engine) as session:
        tenants = _tenants(session, run)
        noisy = tenants.pop(NOISY)
        return Figures(noisy, Quiet(list(tenants.values())), _count(session, run), _totals(session, run))


def _tenants(session: Session, run: str) -> dict[str, Tenant]:
    uploaded = (
        select(Result.tenant, func.min(Result.enqueued_at).label("at"))
        .where(Result.run == run)
        .group_by(Result.tenant)
        .subquery()
    )
    ahead = (
        select(func.count())
        .where(Result.run == run, Result.handed_at < uploaded.c.at)
        .scalar_subquery()
        .correlate(uploaded)
        .label("ahead")
    )
    ahead_of = {row.tenant: row.ahead for row in session.execute(select(uploaded.c.tenant, ahead))}
    turn = func.row_number().over(order_by=(Result.handed_at, Result.place_in_batch)).label("turn")
    wait = func.extract("epoch", Result.finished_at - Result.enqueued_at).label("wait")
    rows = session.execute(select(Result.tenant, turn, wait).where(Result.run == run)).all()
    tenants = {}
    for name, group in groupby(sorted(rows, key=attrgetter("tenant", "turn")), key=attrgetter("tenant")):
        files = list(group)
        waits = sorted(float(file.wait) for file in files)
        tenants[name] = Tenant(name, files[0].turn - ahead_of[name], waits[0], waits)
    return tenants


def _count(session: Session, run: str) -> Count:
    results = (
        select(Result.tenant, Result.path, func.count().label("n"))
        .where(Result.run == run)
        .group_by(Result.tenant, Result.path)
        .subquery()
    )
    same = (Upload.tenant == results.c.tenant) & (Upload.path == results.c.path)
    n = func.coalesce(results.c.n, 0)
    uploads, found, lost, twice = session.execute(
        select(func.count(), func.sum(n), func.count().filter(n == 0), func.count().filter(n > 1))
        .select_from(Upload)
        .outerjoin(results, same)
        .where(Upload.run == run)
    ).one()
    return Count(uploads, int(found), lost, twice, QUEUES[run].backlog(session))


def _totals(session: Session, run: str) -> Totals:
    row = session.execute(
        select(
            func.sum(Result.size),
            func.sum(Result.nodes),
            func.sum(Result.functions),
            func.count().filter(Result.kind == "broken python"),
            func.count().filter(Result.kind == "unreadable"),
        ).where(Result.run == run)
    ).one()
    return Totals(*map(int, row))
