"""Environments that a test's own process runs, where their packages are installed; there is no test in these files."""

import sys
from pathlib import Path

collect_ignore = ["ice.py", "openenv_server.py"]
sys.path.append(str(Path(__file__).parents[2] / "examples" / "environments"))
