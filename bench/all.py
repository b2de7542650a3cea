"""Every benchmark, one after the other, because each wants the machine for itself.

Run: python -m bench.all [--quick] [--check]
"""

from __future__ import annotations

import subprocess
import sys

BENCHES = (
    "data_files", "sandbox", "rewards", "wire", "engine", "weights", "algorithms", "shared_prompts", "overlap",
    "step_overhead", "presets",
)  # fmt: skip


def main() -> int:
    codes = [subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]]).returncode for name in BENCHES]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
