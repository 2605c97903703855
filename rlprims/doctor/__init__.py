"""``rlprims doctor``: check the installed packages, the end tokens of a model, and a cluster."""
