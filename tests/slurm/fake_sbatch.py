#!/usr/bin/env python3
"""A fake sbatch: runs the script's tasks as processes of this machine, at once, and prints a job number.

It reads --array and --output of the #SBATCH lines; all other options are ignored. Job 1 is the first, and the numbers
of the processes are added to `processes` beside the symbolic link that it is called by.
"""

import re
import subprocess
import sys
from pathlib import Path

here, script = Path(sys.argv[0]).parent, Path(sys.argv[-1])
text = script.read_text()
options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.M))
first, _, last = options.get("array", "0-0").partition("-")
note = here / "processes"
number = 1 + len(note.read_text().splitlines()) if note.exists() else 1
with note.open("a") as numbers:
    for task in range(int(first), int(last or first) + 1):
        with open(options["output"].replace("%a", str(task)), "ab") as log:
            process = subprocess.Popen(
                ["bash", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        numbers.write(f"{process.pid} {' '.join(sys.argv[1:])}\n")
print(number)
