"""The page of what ships, made once."""

from __future__ import annotations

import pytest

from sparsegen.report.history_page import Page, report


@pytest.fixture(scope="session")
def shipped_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of the ``tuned/`` that comes with the package, with two studies."""
    from tests.report.studies import write_studies

    folder = tmp_path_factory.mktemp("report")
    return report(folder / "page.html", studies=write_studies(folder / "studies"))
