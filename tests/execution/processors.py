"""Logits processors of a user."""


def without(token_ids, logits, *, ids):
    logits[ids] = -float("inf")
    return logits


def added(token_ids, logits, *, ids, bias):
    return logits.index_fill(0, logits.new_tensor(ids).long(), bias)
