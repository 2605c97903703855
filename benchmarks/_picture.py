"""The report at a glance: for each case, how many times the fastest peer's time is ours. Log axis; 1 is a draw."""

from pathlib import Path
from typing import Any

OURS, THEIRS = "#2f6f8f", "#c8553d"  # bars where we are faster, and where not
FLOORS = ("copy", "products")  # what no one can undercut is no peer


def fastest_peers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case, in order, the row of the fastest that is not ours; cases without one are left out."""
    fastest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["who"] in FLOORS or row["who"].startswith("rlprims"):
            continue
        case = (row["family"], row["case"])
        if case not in fastest or row["ratio"] < fastest[case]["ratio"]:
            fastest[case] = row
    return list(fastest.values())


def draw(rows: list[dict[str, Any]], titles: dict[str, str], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fastest = fastest_peers(rows)
    families = [family for family in titles if any(row["family"] == family for row in fastest)]
    heights = [sum(row["family"] == family for row in fastest) for family in families]
    figure, axes = pyplot.subplots(
        len(families),
        sharex=True,
        squeeze=False,
        figsize=(9, 0.19 * sum(heights) + 0.42 * len(families) + 0.5),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for family, axis in zip(families, axes[:, 0], strict=True):
        of_family = [row for row in fastest if row["family"] == family]
        ratios = [row["ratio"] for row in of_family]
        axis.barh(
            range(len(ratios)), [r - 1 for r in ratios], left=1, color=[OURS if r >= 1 else THEIRS for r in ratios]
        )
        axis.set_yticks(range(len(ratios)), [f"{row['case']}  ({row['who']})" for row in of_family], fontsize=6.5)
        axis.set_title(titles[family], fontsize=8, loc="left")
        for y, r in enumerate(ratios):
            axis.annotate(f" {r:.3g} ", (max(r, 1), y), fontsize=6.5, va="center")
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=0.8)
        axis.margins(y=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xscale("log")
    axes[-1, 0].set_xlabel("time of the fastest peer / time of rlprims", fontsize=8)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)
