"""The project's pages, and the code that stands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """The fenced blocks of a language: what stands behind its name, and the code."""
    return re.findall(rf"^```{language}[ ]*(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
