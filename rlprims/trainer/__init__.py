"""The reference trainer: ``loop`` is a step, ``session`` a run from its config to its summary, ``cli`` the commands.

``collect`` samples and scores until a batch is full, ``fit`` trains on stored rows, ``plan`` computes memory and
seconds of a run by formula, ``doctor`` says what works here.
"""
