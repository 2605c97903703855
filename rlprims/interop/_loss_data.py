"""The names of the data that the loss of a trainer without a critic and without groups can use."""

LOSS_DATA = frozenset(
    {"log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropies", "advantages", "response_mask"}
    | {"losses", "totals"}
)
