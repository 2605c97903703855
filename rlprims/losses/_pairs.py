"""What the preference losses share: one log-prob for each response, in tensors of one shape."""

from torch import Tensor

from rlprims.masking import upcast


def check_responses(**log_probs: Tensor) -> None:
    """Raise ``ValueError`` unless all are floats (P,), of one length."""
    names = ", ".join(log_probs)
    for name, x in log_probs.items():
        if x.dim() != 1 or not x.is_floating_point() or len({len(other) for other in log_probs.values()}) > 1:
            shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in log_probs.items())
            raise ValueError(
                f"{names} need to be floats (P,), one number for each response, of one length; "
                f"the shapes are {shapes}, {name} has dtype {x.dtype}"
            )


def log_ratios(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log π / π_ref of each response, with a gradient to the first only: the implicit reward over β."""
    return upcast(log_probs) - upcast(ref_log_probs).detach()
