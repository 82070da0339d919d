"""The daemon of which Spark's Python workers are forks, with all that each of them would import.

::

    spark.python.daemon.module    fairqueue.spark.worker_daemon

:func:`~fairqueue.spark.local_session` has it. Spark starts one for each kind of worker, with the name of its module,
and as many workers of each as there are tasks at a time. It ends those that had nothing to do for a minute: without
this, the next job waits until all have imported PySpark's Arrow, pandas and this package once more.
"""

import sys
from contextlib import suppress

from pyspark import daemon

if sys.argv[1:] != ["pyspark.sql.worker.lookup_data_sources"]:
    import fairqueue.spark.source  # noqa: F401
if sys.argv[1:] == ["pyspark.worker"]:
    with suppress(ImportError):  # it is nothing that we need
        import pandas as pd  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
