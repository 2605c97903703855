"""Turns to rows."""

# TEMPORARY: they moved to rlprims.layout; delete when no other module imports them from here.
from rlprims.layout import last_of_turn as last_of_turn
from rlprims.layout import turn_boundaries as turn_boundaries
