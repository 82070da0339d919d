"""Java is there where it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairqueue.spark.java import has_java


@pytest.mark.parametrize("by_path", [True, False])
def test_only_a_java_that_runs_is_one(by_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    monkeypatch.setenv(*(("PATH", str(java.parent)) if by_path else ("JAVA_HOME", str(tmp_path))))
    assert not has_java()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    assert not has_java()  # as the one of macOS
    java.write_text("#!/bin/sh\nexit 0\n")
    assert has_java()
