"""The files here need cosmic-ray, which only `make mutants` installs."""

collect_ignore_glob = ["*.py"]
