"""The first half of a step: prompts, or episodes, to scored groups until a batch is full."""
