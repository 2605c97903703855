"""Adapters for other libraries, one module each. A library is imported when a function of its module is called.

``rlprims.interop.verl``: `install` registers with verl; `to_verl` and `from_verl` convert between the DataProtos.
``rlprims.interop.trl``: `reward_func` converts a verifier.
"""
