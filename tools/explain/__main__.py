"""``python -m tools.explain``."""

import sys

from tools.explain import main

if __name__ == "__main__":
    sys.exit(main())
