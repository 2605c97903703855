"""What a trainer without critic and groups at the loss has there, by the names of the vocabulary."""

LOSS_DATA = frozenset(
    {"log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropies", "advantages", "response_mask"}
    | {"losses", "totals"}
)
