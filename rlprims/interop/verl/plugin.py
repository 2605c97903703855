"""Registers on import: the entry point ``verl.plugins``, which verl loads in every process, where rlprims is installed;
elsewhere ``VERL_USE_EXTERNAL_MODULES=rlprims.interop.verl.plugin``.

Does nothing where verl is not installed.
"""

from importlib.util import find_spec

from rlprims.interop.verl import install

if find_spec("verl") is not None:
    install()
