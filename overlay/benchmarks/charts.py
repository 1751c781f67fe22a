"""Charts of benchmark results; matplotlib is asked for only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def roofline(
    series: Mapping[str, Sequence[tuple[float, float]]],
    ceilings: Mapping[str, float],
    title: str,
    out: Path,
    *,
    xlabel: str = "packed weights of a call, MB",
    ylabel: str = "weights read, GB/s",
) -> None:
    """``series``: name -> points (megabytes of a call, GB/s); ``ceilings``: name -> GB/s.

    A PNG of some 60 KB. Raises SystemExit where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("a chart needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=100)
    for name, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), "o", markersize=4, label=name)
    for name, value in ceilings.items():
        axes.axhline(value, linestyle="--", linewidth=1, color="gray")
        axes.annotate(f"{name}: {value:.0f}", (0.01, value), xycoords=("axes fraction", "data"),
                      va="bottom", fontsize=8)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)  # fmt: skip
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def times(
    rows: Sequence[tuple[str, Mapping[str, float]]], title: str, out: Path, *, floor: str = "floor"
) -> None:
    """``rows``: a case's name and the microseconds of each who has it, one line of dots a case;
    who is named ``floor`` is drawn as a stroke.

    A PNG of some 60 KB. Raises SystemExit where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("a chart needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.24 * len(rows)), dpi=100)
    everyone = list(dict.fromkeys(who for _, values in rows for who in values))
    for who in everyone:
        points = [(values[who], -i) for i, (_, values) in enumerate(rows) if values.get(who)]
        if points:
            marker = "|" if who == floor else "o"
            axes.plot(*zip(*points, strict=True), marker, markersize=6, label=who)
    axes.set_yticks([-i for i in range(len(rows))], [name for name, _ in rows], fontsize=8)
    axes.set(xscale="log", xlabel="µs a call", title=title)
    axes.grid(True, which="both", axis="x", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
