"""The command line, in this process and as a process of its own."""

import sys

#: ``subprocess.run([*COMMAND, "status"])``
COMMAND = [sys.executable, "-m", "fairqueue.cli"]
