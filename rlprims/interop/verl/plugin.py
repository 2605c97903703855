"""Registers rlprims with verl on import.

verl loads it in every process through the entry point ``verl.plugins`` of an installed rlprims; without installation
set ``VERL_USE_EXTERNAL_MODULES=rlprims.interop.verl.plugin``. It does nothing if verl is not installed.
"""

from importlib.util import find_spec

from rlprims.interop.verl import install

if find_spec("verl") is not None:
    install()
