"""A fake of `envs.rewards.math_worker`: every comparison takes SLEEP_S seconds and says that the answer is right."""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    print("ready", flush=True)
    for _ in sys.stdin:
        time.sleep(float(os.environ["SLEEP_S"]))
        print('{"value": 1.0}', flush=True)


if __name__ == "__main__":
    main()
