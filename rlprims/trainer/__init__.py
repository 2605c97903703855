"""The reference trainer: ``loop`` is a step, ``session`` a run; what every kind of run keeps is in `rlprims.runs`."""
