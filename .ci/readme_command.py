"""Prints the one command of the README that contains a word, so that CI runs what it says."""

import re
import sys
from pathlib import Path

readme = (Path(__file__).parents[1] / "README.md").read_text()
lines = "".join(re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)).splitlines()
found = [line for line in lines if sys.argv[1] in line]
if len(found) != 1:
    sys.exit(f"README.md has {len(found)} commands with {sys.argv[1]!r}, expected one: {found}")
print(found[0])
