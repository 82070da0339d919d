"""The data source: ``spark.read.format("fairqueue")`` and its siblings. Thin: what it does is in :mod:`..engine`."""

from .source import FairQueueDataSource

__all__ = ["FairQueueDataSource"]
