"""The plans of what a connection runs, also inside functions, by auto_explain: what it costs in rows and buffers.

::

    watched = Watched(raw(database_url))
    statements = watched.run("SELECT fairqueue.message_dequeue('default', 10, 60000)")
    sum(statement.rows_of("message") for statement in statements)
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import TupleRow

Connection = psycopg.Connection[TupleRow]
Node = dict[str, Any]


class Statement(NamedTuple):
    query: str
    nodes: list[Node]

    def rows_of(self, table: str) -> int:
        """How many rows of a table its scans read, those that were filtered out among them."""
        return sum(
            round(
                node["Actual Loops"]
                * (
                    node["Actual Rows"]
                    + node.get("Rows Removed by Filter", 0)
                    + node.get("Rows Removed by Index Recheck", 0)
                )
            )
            for node in self.nodes
            if node.get("Relation Name") == table and "Scan" in node["Node Type"]
        )


class Watched:
    """A connection that keeps the plan of everything it runs."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.statements: list[Statement] = []
        connection.autocommit = True
        connection.add_notice_handler(self._notice)
        connection.execute("LOAD 'auto_explain'")
        for setting, value in {
            "log_min_duration": "0",
            "log_analyze": "on",
            "log_buffers": "on",
            "log_timing": "off",
            "log_format": "json",
            "log_level": "notice",
            "log_nested_statements": "on",
        }.items():
            connection.execute("SELECT set_config(%s, %s, false)", (f"auto_explain.{setting}", value))

    def _notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        _, found, plan = (diagnostic.message_primary or "").partition("plan:")
        if found:
            parsed = json.loads(plan)
            self.statements.append(Statement(parsed["Query Text"], list(nodes(parsed["Plan"]))))

    def run(self, query: str, *parameters: object) -> list[Statement]:
        """Run a statement, and return the plans of what it ran inside."""
        self.statements.clear()
        self.connection.execute(query.encode(), parameters or None)
        return list(self.statements)


def nodes(plan: Node) -> Iterator[Node]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)
