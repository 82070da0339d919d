"""An archive that is killed at a step, for tests: ``python -m tests.spark.archive_killed URL PATH STEP``."""

import os
import signal
import sys

from fairqueue.spark.engine.archives import Archive
from fairqueue.spark.engine.place import Place


class Killed(Archive):
    def _reached(self, step: str) -> None:
        if step == sys.argv[3]:
            os.kill(os.getpid(), signal.SIGKILL)


archive = Killed(
    Place(url=sys.argv[1]), sys.argv[2], feed="archive", each=lambda function, items: [function(i) for i in items]
)
archive.run(max_rows=1000)
