"""Examples: whole applications, to read and to run. They are no part of the installed package."""
