"""``python -m fairqueue.demo``: the same as ``fairqueue demo``."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .command import demo
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("fairqueue: click is not installed; pip install 'fairqueue[demo]'")
    demo.main(prog_name="python -m fairqueue.demo")


if __name__ == "__main__":
    main()
