"""Reports of a run: curves, tables, progress, and its samples in a terminal or as a page."""
