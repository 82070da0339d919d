"""The figures as a picture: one line a tenant, one dot a file, the two queues side by side."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .figures import Figures
from .load import NOISY, Load
from .report import seconds

_NOISY, _QUIET, _GREY = "#c8690a", "#1f5fa8", "#555555"
#: More quiet tenants than that are drawn without their names.
_NAMED = 40


def draw(path: Path, load: Load, arrival: Figures, fair: Figures) -> None:
    tenants = len(fair.tenants)
    figure = Figure(figsize=(12, min(3.2 + 0.24 * tenants, 11)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(load), fontsize=15, fontweight="bold")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    _panel(left, arrival, "Arrival order: the quiet tenants wait for the noisy one")
    _panel(right, fair, "fairqueue: the tenants take turns")
    left.set_xlim(0, 1.03 * max(tenant.worst for run in (arrival, fair) for tenant in run.tenants))
    left.set_ylim(tenants - 0.4, -0.6)
    if tenants <= 1 + _NAMED:
        left.set_yticks(range(tenants), [tenant.name for tenant in fair.tenants])
    else:
        left.set_yticks([0, tenants // 2], [NOISY, f"{tenants - 1:,} quiet\ntenants"])
    for row, label in enumerate(left.get_yticklabels()):
        label.set_color(_QUIET if row else _NOISY)
    figure.supxlabel(
        "seconds from a file's upload to its result: a dot for each file, a bar up to the tenant's last",
        fontsize=11,
        color=_GREY,
    )
    figure.savefig(path, dpi=110)


def _title(load: Load) -> str:
    first, others = load.noisy_files, len(load.quiet)
    each = len(load.uploads[load.quiet[0]])
    return (
        f"One tenant uploads {first:,} file{'s' if first > 1 else ''}, then"
        f" {f'{others:,} others {each} each' if others > 1 else f'another one {each}'}: how long they wait"
    )


def _panel(axes: Axes, figures: Figures, title: str) -> None:
    axes.set_title(title, fontsize=13, color=_GREY, pad=34)
    axes.annotate(
        f"a quiet tenant waits up to {seconds(figures.quiet.worst)} s",
        (0.5, 1),
        (0, 11),
        xycoords="axes fraction",
        textcoords="offset points",
        horizontalalignment="center",
        fontsize=14,
        fontweight="bold",
        color=_QUIET,
    )
    for row, tenant in enumerate(figures.tenants):
        colour = _QUIET if row else _NOISY
        axes.barh(row, tenant.worst, height=0.7, color=colour, alpha=0.25, linewidth=0)
        axes.plot(tenant.waits, [row] * len(tenant.waits), ".", color=colour, markersize=5 if row else 2)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
