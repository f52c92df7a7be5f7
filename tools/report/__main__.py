"""``python -m tools.report``."""

import sys

from tools.report import main

if __name__ == "__main__":
    sys.exit(main())
