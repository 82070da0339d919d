"""Whether there is Java, which Spark needs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def has_java() -> bool:
    """Whether Java runs: macOS has a ``java`` on the path that only says that there is none."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else "java"
    try:
        return subprocess.run([java, "-version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
