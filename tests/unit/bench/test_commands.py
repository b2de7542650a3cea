"""Every benchmark that the pages name is there, and its module loads: no import of it is wrong."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")]
NAMED = sorted({name for page in PAGES for name in re.findall(r"-m (bench[.\w]*\w)", page.read_text())})


@pytest.mark.timeout(300)
def test_every_benchmark_that_a_page_names_starts():
    for name in NAMED:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):  # a package is started by its __main__
            module = importlib.import_module(f"{name}.__main__")
        assert callable(getattr(module, "main", None)), name

    assert len(NAMED) > 25
