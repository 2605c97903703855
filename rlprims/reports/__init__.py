"""Reports of a run: curves and tables, and its samples in a terminal or as a page."""
