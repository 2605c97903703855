"""``rlprims doctor``: what is installed, what a model's files say, and a cluster on trial."""
