"""Adapters for other libraries. A library is imported when a function of its module is called.

``rlprims.interop.verl``: `install` registers with verl; `to_verl` and `from_verl` convert between the DataProtos. Those
of TRL and others are files of ``examples``.
"""
