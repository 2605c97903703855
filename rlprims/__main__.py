"""``python -m rlprims``, and the command ``rlprims``."""

import os
import sys


def main() -> int:
    # OpenMP reads this when torch is imported. If processes share cores, spinning threads are 3 to 6 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from rlprims.cli import main as command
    except ModuleNotFoundError as error:
        sys.stderr.write(f"rlprims: {error.name} is not installed: pip install . in the clone of rlprims\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
