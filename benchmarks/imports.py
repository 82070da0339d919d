"""How long does importing fairqueue take, compared with importing SQLAlchemy's ORM?

    python -m benchmarks.imports [pairs]

Starts an interpreter for each, by turns (9 pairs unless told), and prints the medians of the ratios: of `import
fairqueue` alone, which loads nothing yet, and of all names but Worker, and of all.
"""

import statistics
import subprocess
import sys

REFERENCE = "import sqlalchemy.orm"
IMPORTS = {
    "import fairqueue": "import fairqueue",
    "and all but Worker": "import fairqueue as f; [getattr(f, name) for homes in f._HOMES.items()"
    " if homes[0] != 'worker' for name in homes[1]]",
    "and all": "import fairqueue as f; [getattr(f, name) for name in f.__all__]",
}


def main(pairs: int = 9) -> None:
    for label, code in IMPORTS.items():
        ratios = [seconds(code) / seconds(REFERENCE) for _ in range(pairs)]
        print(f"{label}: {statistics.median(ratios):.2f} of {REFERENCE}")


def seconds(code: str) -> float:
    timed = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
