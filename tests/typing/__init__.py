"""What type checkers see: nothing here runs, mypy and pyright check it."""
