"""Bridges to other libraries, one module each. None of them is imported, nor needed, until a function here is called.

``rlprims.interop.verl``: `install` registers with verl; `to_verl` and `from_verl` cross between the DataProtos.
``rlprims.interop.trl``: `grpo_trainer` gives TRL's trainer an algorithm, `reward_func` a verifier.
"""
