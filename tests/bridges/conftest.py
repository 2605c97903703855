"""Environments that a test's own process runs, where their packages are installed; there is no test in these files."""

collect_ignore = ["ice.py", "openenv_server.py"]
