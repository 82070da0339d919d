"""A driver that two jobs keep busy until it is killed: `python -m tests.dying_driver URL FOLDER`.

The job "before" is about to enter its load, the job "after" has done so and nobody has heard of it.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fairqueue.spark import local_session
from tests.faulty import FaultySource
from tests.fixtures.spark import SETTINGS


def main(url: str, folder: Path) -> None:
    with local_session("local[2]", memory="512m", settings=SETTINGS) as spark, ThreadPoolExecutor(2) as pool:
        spark.dataSource.register(FaultySource)

        def load(job: str) -> None:
            # In a thread, Spark knows data sources only after it was given a frame there.
            rows = spark.createDataFrame([(job, f"k{number}") for number in range(100)], "channel string, key string")
            faults = {"driver": f"wait {job}", "folder": str(folder)}
            options = {"url": url, "job": job, "faults": json.dumps(faults)}
            rows.write.format("faulty").mode("append").options(**options).save()

        list(pool.map(load, ("before", "after")))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
