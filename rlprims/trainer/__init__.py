"""The thin reference trainer: one loop over an :class:`rlprims.execution.Execution`, and the command line around it."""
