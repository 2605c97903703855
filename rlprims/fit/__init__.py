"""``rlprims fit``: training on stored rows."""
