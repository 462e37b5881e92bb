"""`python -m jmpx`: what a policy string means, and what a program does; see `jmpx._cli`."""

import sys

from jmpx._cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
