"""The command line, `python -m jmpx`: one file for each kind of command.

- `main.py`: the table of commands and of their arguments, and the exit codes. A new command is a
  row in it, and a function in `commands.py`.
- `explain.py`: what a policy string means. `doctor.py`: versions, devices and settings, and what of
  them does not fit together.
- `targets.py`: imports what a user names as `pkg.module:make`, with its flags, and turns an error
  of the user's code into one line.

A command imports what it needs when it runs, so that `explain` starts without autocast and the
frameworks. This room may import every other one; nothing imports it but `jmpx/__main__.py`.
"""
