"""``python -m rlprims``, and the command ``rlprims``."""

import os
import sys
import warnings


def main() -> int:
    # OpenMP reads this when torch is imported. If processes share cores, spinning threads are 3 to 6 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")  # the run says it in a line
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without the path of a library
    try:
        from rlprims.cli import main as command
    except ModuleNotFoundError as error:
        sys.stderr.write(f"rlprims: {error.name} is not installed: pip install . in the clone of rlprims\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
