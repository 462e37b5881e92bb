"""The command line, `python -m jmpx`.

- `main.py`: the table of commands and of their arguments, and the exit codes. A new command is a
  row in it, and a function in `commands.py`.
- `commands.py`: imports the program that a user names as `pkg.module:make`, with its flags;
  explains policy strings; runs the other commands.
- `doctor.py`: versions, devices and settings, and which of them do not fit together.

A command imports what it needs when it runs, so that `explain` starts without autocast and the
frameworks. This package may import every other one; only `jmpx/__main__.py` imports it.
"""
