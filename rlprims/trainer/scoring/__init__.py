"""From texts to scores, and from scores to shaped, filtered groups."""
