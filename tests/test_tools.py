"""The servers of `make matrix`."""

from __future__ import annotations

import runpy

import pytest

from tests.pages import ROOT


@pytest.mark.parametrize(
    ("system", "machine", "told"),
    [
        ("Darwin", "arm64", "their packages are for Linux on x86_64, and this is Darwin on arm64"),
        ("Linux", "aarch64", "their packages are for Linux on x86_64, and this is Linux on aarch64"),
        ("Linux", "x86_64", "there is no npm here"),
    ],
)
def test_other_versions_are_skipped_aloud(
    system: str, machine: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setenv("PATH", "")
    tool = runpy.run_path(str(ROOT / "tools" / "postgres_versions.py"))
    assert tool["versions"]() == []
    assert capsys.readouterr().err == f"Other versions of PostgreSQL are skipped: {told}.\n"
