"""Bridges to other libraries, one module each. None of them is imported, nor needed, until a function here is called.

``rlprims.interop.verl``: `install` registers with verl; `to_verl` and `from_verl` cross between the DataProtos.
``rlprims.interop.trl``: `grpo_trainer` and `rloo_trainer` give TRL's trainers an algorithm, `reward_func` a verifier.
``rlprims.interop.torchrl``: `grpo_loss` makes an algorithm one of torchrl's loss modules.
``rlprims.interop.gym``, ``textarena``, ``reasoning_gym``, ``openenv``: environments of these packages, played here.
``rlprims.interop.verifiers``: environments of verifiers, played here, and `to_verifiers`, which plays ours there.
"""
