"""Every claim about the speed of codecs, measured on this machine.

    python benchmarks/compress.py                   on the CPU, one thread (a few minutes)
    python benchmarks/compress.py --device cuda     on a GPU (a few minutes; the largest size for the claims' codecs alone)
    python benchmarks/compress.py --quick           small sizes, two rounds: does the script work?

It is `stretto bench compress` with all codecs, and then the claims: each compares calls with a copy that took turns with them.

    CPU    Int8, Sign, BFloat16: encoding and then decoding at 50 % of a copy's rate, on one core. All three write to memory
           that is there, as they do in training; beside it stands what the same calls take into new memory (`_new`).
    GPU    the same codecs: encoding, and decoding, each at 75 % of a copy's rate; TopK: encoding in 3 times a copy's time

Writes `compress_MACHINE_DATE.json` (every time of every round, versions, machine) and `.md` (claims with verdicts, then all rows,
also those where we lose). Let the machine be idle.
"""

from __future__ import annotations

import shlex
import statistics
from dataclasses import dataclass
from itertools import groupby

import harness
import msgspec
from harness import ratio

from stretto.bench.compress_measure import measure
from stretto.bench.compress_results import CompressReport, CompressRow
from stretto.bench.compress_settings import CompressSettings, check, parse_codecs
from stretto.bench.compress_show import footnotes, pay_table, recommendations, sent_table, show, speed_table
from stretto.bench.settings import parse_sizes, show_size

SIZES = {"cpu": "1M,4M,64M", "cuda": "4M,64M"}
LIMIT_S = {"cpu": 60.0, "cuda": 10.0}  # for one codec and size; without a kernel of their own, codecs are slow on a GPU
CLAIMED = {"cpu": 64 << 20, "cuda": 256 << 20}  # beyond all caches
QUICK_SIZES = "64K,256K"


@dataclass(frozen=True)
class SpeedClaim:
    """These calls of a codec, one after the other, at `target` times a copy's rate or more."""

    codec: str
    calls: tuple[str, ...]
    target: float

    @property
    def text(self) -> str:
        return f"{self.codec}, {' + '.join(self.calls)}: x a copy's rate, at least"


FAST = ("Int8()", "Sign()", "BFloat16()")
CLAIMS = {
    "cpu": tuple(SpeedClaim(codec, ("encode", "decode"), 0.5) for codec in FAST),
    "cuda": (
        *(SpeedClaim(codec, (call,), 0.75) for codec in FAST for call in ("encode", "decode")),
        SpeedClaim("TopK(0.01)", ("encode",), 1 / 3),
    ),
}
IN_TRAINING, NEW_MEMORY = ("encode", "add_decoded"), ("encode_new", "decode_new")
BESIDE = {  # no claims: what the exchanges call, and what it is worth to write to memory that is there
    "cpu": tuple(SpeedClaim(codec, calls, 0.5) for calls in (IN_TRAINING, NEW_MEMORY) for codec in FAST),
    "cuda": tuple(SpeedClaim(codec, (call,), 0.75) for codec in FAST for call in ("encode_residual", "add_decoded")),
}


def judged(claim: SpeedClaim, row: CompressRow, claimed: int | None) -> str:
    """One line of the table: the two took turns, so they are compared round by round. `claimed`: the size that it is about."""
    taken = [sum(times) for times in zip(*(row.calls[call].seconds for call in claim.calls), strict=True)]
    found = ratio(row.copy.seconds, taken)
    verdict = found.at_least(claim.target, len(taken))
    if claimed is None:
        verdict = "no claim"
    elif claimed != row.size:
        verdict = f"not judged: the claim is about {show_size(claimed)}"
    return f"| {claim.text} | {show_size(row.size)} | {claim.target:.2f} | {found} | {verdict} |"


def claims_table(report: CompressReport) -> list[str]:
    device, largest = report.settings.device, max(report.settings.sizes)
    rows = {row.codec: row for row in report.rows if row.size == largest}
    lines = harness.table("claim", "size", "target", "measured", "verdict")
    for claims, claimed in ((CLAIMS[device], CLAIMED[device]), (BESIDE[device], None)):
        lines += [judged(claim, rows[claim.codec], claimed) for claim in claims if claim.codec in rows]
    return lines


def copies(report: CompressReport) -> list[str]:
    """What a copy took in the turns of all codecs."""
    lines = []
    for size, rows in groupby(report.rows, key=lambda row: row.size):
        seconds = [(row.copy.median, row.clone.median) for row in rows]
        there, new = (size / statistics.median(each) / 1e9 for each in zip(*seconds, strict=True))
        lines.append(f"A copy of {show_size(size)}: {there:,.1f} GB/s; into new memory: {new:,.1f} GB/s.")
    return lines


def claims_alone(settings: CompressSettings) -> CompressSettings:
    """What the claims are about, where it takes a larger size than all codecs can be measured on."""
    codecs = [word for word in settings.codecs if word in {claim.codec for claim in CLAIMS[settings.device]}]
    return msgspec.structs.replace(settings, sizes=[CLAIMED[settings.device]], codecs=codecs)


def joined(first: CompressReport, more: CompressReport) -> CompressReport:
    settings = msgspec.structs.replace(first.settings, sizes=first.settings.sizes + more.settings.sizes)
    return msgspec.structs.replace(first, settings=settings, rows=first.rows + more.rows)


def as_markdown(report: CompressReport) -> list[str]:
    settings = report.settings
    lines = [
        *harness.heading("Codecs", report.date, settings.command, report.machine, _gpu(report)),
        f"Median over {settings.rounds} rounds (fewer where they take over {settings.limit_s:g} s), each call once per round, "
        "in turn with a copy. Ratios of claims are of the turns of each round, with the 95 % interval of the median.",
        "",
        *claims_table(report),
        "",
        *copies(report),
        "",
        *footnotes(settings).splitlines(),
    ]
    for size, group in groupby(report.rows, key=lambda row: row.size):
        rows = list(group)
        for title, head, cells in (speed_table(rows), sent_table(rows), pay_table(rows, settings)):
            lines += ["", f"## {show_size(size)}: {title}", "", *harness.table(*head)]
            lines += [f"| {' | '.join(line)} |" for line in cells]
        lines += ["", *(f"- {line}" for line in recommendations(rows, settings))]
    return lines


def _gpu(report: CompressReport) -> str | None:
    return report.machine.gpu if report.settings.device == "cuda" else None


def main(arguments: list[str]) -> None:
    parser = harness.parser("Measure every claim about codecs on this machine.", quick="small sizes, two rounds")
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu", help="where the values are (cpu)")
    parser.add_argument("--sizes", help=f"bytes of gradients ({SIZES['cpu']}; on a GPU {SIZES['cuda']} and 256M)")
    parser.add_argument("--codecs", default="all", help='with commas: "Int8(), Sign()" (all)')
    parser.add_argument("--workers", type=int, default=4, help="how many take part in an exchange (4)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (15)")
    options = parser.parse_args(arguments)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES[options.device])
    settings = CompressSettings(
        sizes=sorted(set(parse_sizes(sizes))),
        codecs=parse_codecs(options.codecs),
        device=options.device,
        workers=options.workers,
        rounds=2 if options.quick else options.rounds,
        limit_s=LIMIT_S[options.device],
        command=shlex.join(["python", "benchmarks/compress.py", *arguments]),
    )
    report = measure(check(settings))
    if options.device == "cuda" and not (options.sizes or options.quick):
        report = joined(report, measure(claims_alone(settings)))
    show(report)
    text, folder = as_markdown(report), harness.folder_of(options)
    harness.show(claims_table(report), harness.write("compress", report, text, report.date, report.machine, folder, _gpu(report)))


if __name__ == "__main__":
    harness.run(main)
