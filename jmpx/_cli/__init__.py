"""The command line, `python -m jmpx`.

- `main.py`: the table of commands and of their arguments, and the exit codes. A new command is a
  row in it, and a function in `commands.py`.
- `commands.py`: the commands; what a policy string means; the import of what a user names as
  `pkg.module:make`, with its flags.
- `doctor.py`: versions, devices and settings, and what of them does not fit together.

A command imports what it needs when it runs, so that `explain` starts without autocast and the
frameworks. This room may import every other one; nothing imports it but `jmpx/__main__.py`.
"""
