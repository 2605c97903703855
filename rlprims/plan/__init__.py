"""``rlprims plan``: compute the memory and the seconds of a run from formulas, before anything is loaded."""
