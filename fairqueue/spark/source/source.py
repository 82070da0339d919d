"""The data source: which reader and writer Spark gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from .reader import TableReader
    from .stream_reader import FeedReader
    from .stream_writer import StreamWriter
    from .writer import JobWriter

__all__ = ["FairQueueDataSource"]


class FairQueueDataSource(DataSource):
    """``format("fairqueue")``: registered by ``spark.dataSource.register(FairQueueDataSource)``."""

    @classmethod
    def name(cls) -> str:
        return "fairqueue"

    def schema(self) -> str:
        from .reader import schema_of

        return schema_of(self.options)

    def reader(self, schema: StructType) -> TableReader:
        from .reader import TableReader

        return TableReader(self.options, schema)

    def streamReader(self, schema: StructType) -> FeedReader:  # noqa: N802
        from .stream_reader import FeedReader

        return FeedReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> JobWriter:
        from .writer import JobWriter

        return JobWriter(self.options, schema, overwrite)

    # Spark calls it by these names.
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        from .stream_writer import StreamWriter

        return StreamWriter(self.options, schema, overwrite)
