"""`stretto report DIR`: read the folder, write the page, print the sentence and the main figures."""

from __future__ import annotations

import sys
from pathlib import Path

from stretto.errors import ConfigurationError
from stretto.observe.merge import read, read_servers
from stretto.observe.quantities import percent, seconds, size
from stretto.plan.planned import PlannedStep, read_planned
from stretto.report.bottleneck import find_bottleneck
from stretto.report.figures import JobFigures, job_figures
from stretto.report.page import make_page
from stretto.report.timeline import make_timeline


def write_report(folder: Path, output: Path | None) -> None:
    files = read(folder)
    planned = read_planned(folder)
    servers = read_servers(folder, files)
    job = job_figures(files, servers)
    bottleneck = find_bottleneck(job, planned)
    target = output or folder / "report.html"
    page = make_page(folder.resolve().name, job, bottleneck, make_timeline([*files, *servers]), planned)
    try:
        target.write_bytes(page)
    except OSError as problem:
        raise ConfigurationError(f"{target} cannot be written ({problem.strerror}). Name another file with -o FILE.") from problem
    sys.stdout.write(f"{bottleneck.sentence}\n\n")
    for name, value in main_figures(job, planned):
        sys.stdout.write(f"  {name:<24} {value}\n")
    sys.stdout.write(f"\nwritten: {target}; open it in a browser\n")


def main_figures(job: JobFigures, planned: PlannedStep | None) -> list[tuple[str, str]]:
    """Those at the top of the page, in words."""
    made = []
    if job.step_s is not None and job.step_low_s is not None and job.step_high_s is not None:
        made.append(("step", f"{seconds(job.step_s)} ({seconds(job.step_low_s)} to {seconds(job.step_high_s)})"))
    if planned is not None and planned.predicted_s is not None:
        made.append(("predicted", seconds(planned.predicted_s)))
    if job.utilisation is not None:
        made.append(("computing (U)", percent(job.utilisation)))
    if job.overlap is not None:
        made.append(("overlap (alpha)", f"{job.overlap:.2f}"))
    if job.network_to_compute is not None:
        made.append(("network/compute (rho)", f"{job.network_to_compute:.2f}"))
    if job.servers is not None and job.servers.staleness:
        steps = sum(job.servers.staleness.values())
        mean = sum(stale * count for stale, count in job.servers.staleness.items()) / steps
        made.append(("staleness", f"{mean:.2f} on average, at most {max(job.servers.staleness)}"))
    made.append(("sent per rank and step", size(job.bytes_sent)))
    made.append(("ranks", f"{len(job.ranks)} of {job.world_size}"))
    return made
