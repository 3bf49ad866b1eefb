"""Puts the tests' own helpers on the path (the suite is collected by file, not as a package)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
