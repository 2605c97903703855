"""The bounds of a clipped ratio, checked alike wherever there are some."""


def check_ratio_bounds(clip_low: float, clip_high: float) -> None:
    """Raise ``ValueError`` unless 1 − clip_low and 1 + clip_high lie around 1 and above 0."""
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must be in [0, 1] and clip_high={clip_high} at least 0")
