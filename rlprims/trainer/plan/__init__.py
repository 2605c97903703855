"""``rlprims plan``: the memory and the seconds of a run by formula, before anything is loaded."""
