"""The example of docs/sandbox.md runs as it stands."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_the_example_of_the_page_prints_what_it_says() -> None:
    example = (ROOT / "docs/sandbox.md").read_text().split("```python\n")[1].split("```")[0]
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, timeout=60)
    lines = run.stdout.splitlines()
    assert lines[0].startswith("level "), run.stderr
    assert lines[1] == "ok 49"
    assert lines[3].startswith("error") and "ValueError" in run.stdout
