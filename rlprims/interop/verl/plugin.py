"""Registers on import: ``VERL_USE_EXTERNAL_MODULES=rlprims.interop.verl.plugin``, read by verl in every process.

Does nothing where verl is not installed.
"""

from importlib.util import find_spec

from rlprims.interop.verl import install

if find_spec("verl") is not None:
    install()
