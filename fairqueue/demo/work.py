"""The work: real, and worth a few milliseconds a file.

A Python file is parsed and its syntax tree counted; of any other file the lines are counted. Both are hashed and
compressed. Of a large file only the beginning is examined. One that doesn't parse, or can't be read, is a result like
any other.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
import zlib
from dataclasses import dataclass

_CHUNK = 1 << 20
#: Python files beyond this size are data in disguise; their syntax tree would take gigabytes.
_PARSED_UP_TO = 4 << 20
#: A few seconds' work. A file that took longer than its lease would be taken again and again, and never be done.
EXAMINED_UP_TO = 64 << 20


@dataclass
class Findings:
    """What is known of a file; ``kind`` is python, broken python, text, binary or unreadable."""

    kind: str
    #: As much as was examined.
    size: int = 0
    compressed: int = 0
    sha256: str = ""
    lines: int = 0
    nodes: int = 0
    functions: int = 0


def examine(path: str) -> Findings:
    """Read, hash, compress and count one file, a piece at a time; of a large one, the beginning."""
    findings = Findings("text")
    digest, compressor = hashlib.sha256(), zlib.compressobj()
    source = b""
    try:
        with open(path, "rb") as file:
            while findings.size < EXAMINED_UP_TO and (piece := file.read(_CHUNK)):
                if not findings.size and b"\0" in piece:
                    findings.kind = "binary"
                if path.endswith(".py") and findings.size < _PARSED_UP_TO:
                    source += piece
                findings.size += len(piece)
                findings.lines += piece.count(b"\n")
                findings.compressed += len(compressor.compress(piece))
                digest.update(piece)
    except OSError:
        return Findings("unreadable")
    findings.compressed += len(compressor.flush())
    findings.sha256 = digest.hexdigest()
    if path.endswith(".py") and findings.size <= _PARSED_UP_TO:
        _parse(source, findings)
    return findings


def _parse(source: bytes, findings: Findings) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of somebody else's code
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last is how the parser says "too deep"
        findings.kind = "broken python"
        return
    findings.kind = "python"
    for node in ast.walk(tree):
        findings.nodes += 1
        findings.functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
