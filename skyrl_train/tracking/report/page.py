"""report.html: one file without links to anything outside it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.tracking.format import compact, number, percent, seconds
from skyrl_train.tracking.names import METRICS, STEP_TIME
from skyrl_train.tracking.report.history import History
from skyrl_train.tracking.report.summary import Summary
from skyrl_train.tracking.transcripts import shortened

CSS = """
:root { --ink: #0f172a; --muted: #64748b; --line: #e2e8f0; --page: #f8fafc; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { margin: 0; font-size: 28px; }
h2 { margin: 40px 0 12px; font-size: 18px; }
.muted { color: var(--muted); }
.tiles { display: flex; flex-wrap: wrap; gap: 14px; margin: 24px 0 14px; }
.tiles .card { flex: 1 1 auto; }
.charts, .samples { display: grid; gap: 14px; grid-template-columns: repeat(3, 1fr); }
.span2 { grid-column: span 2; } .span3 { grid-column: span 3; }
.card { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; overflow: hidden; }
.card svg { display: block; width: 100%; height: auto; }
.value { font-size: 22px; font-weight: 650; white-space: nowrap; }
table { width: 100%; border-collapse: collapse; background: white; border: 1px solid var(--line); border-radius: 10px; }
th, td { padding: 6px 14px; text-align: left; border-top: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 500; border-top: 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { text-align: right; }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { margin: 8px 0 0; white-space: pre-wrap; }
.response { border-left: 3px solid var(--line); padding-left: 10px; }
.response.good { border-color: #16a34a; } .response.bad { border-color: #dc2626; }
details summary { cursor: pointer; }
footer { margin-top: 40px; font-size: 13px; }
@media (max-width: 900px) { .charts, .samples { grid-template-columns: 1fr; } .span2, .span3 { grid-column: auto; } }
"""


def page(
    summary: Summary, history: History, svgs: Sequence[tuple[str, int]], samples: Sequence[Mapping[str, Any]]
) -> str:
    """The whole document.

    Args: svgs holds (element, columns of three) of each chart; samples holds transcripts as in samples.jsonl.
    """
    name = html.escape(summary.run_name)
    charts = "\n".join(f'<div class="card span{span}">{svg}</div>' for svg, span in svgs)
    versions = " · ".join(f"{package} {version}" for package, version in summary.versions.items())
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>{CSS}</style></head>
<body><main>
<h1>{name}</h1>
<div class="muted">{html.escape(summary.line())}</div>
<div class="tiles">{tiles(summary, history)}</div>
<div class="charts">
{charts}
</div>
{samples_section(samples)}
{changes_section(summary.changes)}
{metrics_section(history)}
<footer class="muted">{html.escape(versions)}</footer>
</main></body></html>
"""


def tiles(summary: Summary, history: History) -> str:
    """The headline numbers."""
    facts = [(summary.score_name, summary.score_text())]
    for label, name, formatted in (
        ("mean time per step", STEP_TIME, seconds),
        ("tokens/s generated, mean", "perf/generate_tokens_per_s", compact),
        ("tokens/s trained, mean", "perf/train_tokens_per_s", compact),
        ("weight sync GB/s, mean", "perf/sync_gb_per_s", number),
        ("MFU, mean", "perf/mfu", percent),
        ("driver share, mean", "perf/driver_share", percent),
    ):
        series = history.series(name)
        if len(series):
            facts.append((label, formatted(series.mean)))
    return "".join(
        f'<div class="card"><div class="muted">{html.escape(label)}</div>'
        f'<div class="value">{html.escape(value)}</div></div>'
        for label, value in facts
    )


def changes_section(changes: Mapping[str, Any]) -> str:
    """What the run's config changes in the base config."""
    if not changes:
        return ""
    rows = "".join(
        f"<tr><td><code>{html.escape(key)}</code></td><td><code>{html.escape(str(value))}</code></td></tr>"
        for key, value in changes.items()
    )
    return (
        "<h2>Configuration <span class='muted'>(what differs from the base; all of it is in config.yaml)</span></h2>"
        f"<table><tr><th>key</th><th>value</th></tr>{rows}</table>"
    )


def samples_section(samples: Sequence[Mapping[str, Any]]) -> str:
    """Transcripts as cards."""
    if not samples:
        return ""
    return f'<h2>Samples</h2><div class="samples">{"".join(map(sample_card, samples))}</div>'


def sample_card(sample: Mapping[str, Any]) -> str:
    reward = float(sample["reward"])
    verdict = "good" if reward > 0 else "bad"
    return (
        f'<div class="card"><span class="muted">step {sample["step"]} · reward {number(reward)} · '
        f"{html.escape(str(sample['stop_reason']))}</span>"
        f'<pre class="muted">{html.escape(shortened(str(sample["prompt"])))}</pre>'
        f'<pre class="response {verdict}">{html.escape(shortened(str(sample["response"])))}</pre></div>'
    )


def metrics_section(history: History) -> str:
    """First, last, least and largest value of every metric, folded."""
    units = {metric.name: metric.unit for metric in METRICS}
    rows = ""
    for name in history.names():
        series = history.series(name)
        if name in ("trainer/global_step", "trainer/unix_time_s"):
            continue
        numbers = (series.first, series.last, min(series.values), max(series.values))
        cells = "".join(f'<td class="number">{number(value)}</td>' for value in numbers)
        rows += f"<tr><td><code>{html.escape(name)}</code></td><td>{units.get(name, '')}</td>{cells}</tr>"
    heads = "".join(f'<th class="number">{head}</th>' for head in ("first", "last", "least", "largest"))
    return (
        "<h2>All metrics</h2><details><summary class='muted'>show</summary>"
        f"<table><tr><th>metric</th><th>unit</th>{heads}</tr>{rows}</table></details>"
    )
