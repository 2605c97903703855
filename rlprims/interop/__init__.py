"""Bridges to other libraries, one module each. None of them is imported, nor needed, until a function here is called.

``rlprims.interop.verl``: `to_verl` and `from_verl`, between this library's DataProto and verl's.
"""
