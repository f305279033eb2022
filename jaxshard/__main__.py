"""`python -m jaxshard` is the `jaxshard` command."""

import sys

from jaxshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
