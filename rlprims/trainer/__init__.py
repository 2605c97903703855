"""The reference trainer: ``loop`` is a step, ``session`` a run from its config to its summary.

``collect`` samples and scores until a batch is full. What every kind of run keeps is in :mod:`rlprims.runs`.
"""
