"""Statements that are written out, as `fairqueue migrate --sql` has them."""

from sqlalchemy import Engine, text


def run(engine: Engine, statements: list[str]) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement.replace(":", r"\:")))
