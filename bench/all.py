"""Every benchmark, one after the other, because each wants the machine for itself.

Run: python -m bench.all [--quick] [--check]
"""

from __future__ import annotations

import subprocess
import sys

BENCHES = ("data_files", "sandbox", "wire", "engine", "weights", "algorithms", "overlap", "presets")


def main() -> int:
    codes = [subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]]).returncode for name in BENCHES]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
