"""Values that are refused: names, numbers and payloads that are none."""

import math
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import create_engine

NAN, INF = math.nan, math.inf
ROUND: list[Any] = []
ROUND.append(ROUND)
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
# Nobody is there to ask: what is refused is refused before.
LOST = create_engine("postgresql+psycopg://nobody@localhost:1/nowhere")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)

NAMES = {
    "none": None,
    "empty": "",
    "256 characters": "x" * 256,
    "1 MB": "x" * 1_000_000,
    "with NUL": "nul\x00",
    "with half a surrogate pair": "half \ud83d",
    "number": 7,
    "bytes": b"acme",
}
NOT_JSON = [
    NAN,
    INF,
    {"deep": [{"er": -INF}]},
    "nul \x00",
    "\\u0000, and behind a backslash: \\\x00",
    {"a": ["b", {"nul \x00": 1}]},
    ["half \ud83d"],
    {"half \udfff": 1},
    "wrong way round \ude00\ud83d",
    "backslash \\ud83d\ude00 and half",
    object(),
    {1, 2},
    b"bytes",
    NOON,
    {("a", "b"): 1},
    ROUND,
    DEEP,
]
