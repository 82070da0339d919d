"""``python -m fairqueue.cli``: the same as the console script ``fairqueue``."""

from . import main

if __name__ == "__main__":
    main()
