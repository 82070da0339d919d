"""Calls of the installed plpgsql functions, in whatever schema the statement runs against."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import MetaData, Table
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import Function

from .schema import DEFAULT_SCHEMA

__all__ = ["SchemaFunction"]


class SchemaFunction(Function[Any]):
    """``fairqueue.<name>(...)``, where ``schema_translate_map`` applies to the schema as it does for tables.

    SQLAlchemy translates the schema of tables only; so the name is rendered as that of a table would be.
    """

    inherit_cache = True

    def __init__(self, name: str, *arguments: Any, type_: Any = None) -> None:
        super().__init__(name, *arguments, type_=type_)
        self.target = _target(name)


@cache  # making a table takes longer than all else that a statement is made of
def _target(name: str) -> Table:
    return Table(name, MetaData(), schema=DEFAULT_SCHEMA)


@compiles(SchemaFunction)
def _compile(element: SchemaFunction, compiler: SQLCompiler, **kw: Any) -> str:
    add_to_result_map = kw.pop("add_to_result_map", None)
    if add_to_result_map is not None:
        add_to_result_map(element.name, element.name, (element.name,), element.type)
    return compiler.preparer.format_table(element.target) + compiler.function_argspec(element, **kw)
