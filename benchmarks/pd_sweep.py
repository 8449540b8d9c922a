"""How a fixed number of workers is best split: Mooncake's conversation trace over every P:D of 16 workers.

    python benchmarks/pd_sweep.py [--workers 16] [--prefill P …] [--limit N] [--pulls] [--svg FILE]

Prints a row for each split, then how many answer tokens the simulator has computed in a second of one core. Too few
prefill workers let prompts queue, too few decode workers let pages run out: a plateau between two cliffs.
"""

import argparse
import math
import time
from pathlib import Path

from benchmarks.plot import Chart, svg_file
from planning.simulator.cluster import ClusterSpec, simulate
from planning.simulator.html_report import Curve
from planning.simulator.jobs import WorkerSpec
from planning.simulator.profiles import profile
from planning.simulator.report import Targets, summary
from planning.simulator.traces import compressed, read_trace
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.prediction import LinkSpeed
from services.scheduling.routing.price import RoutingSettings

TRACE = Path(__file__).parent / "traces" / "mooncake_fast25_conversation.jsonl.gz"
PROFILE = "a100-llama-3.1-70b-bf16-tp8"
TARGETS = Targets(ttft_s=30.0, tpot_s=0.1)
"""Mooncake's own limits for this trace: 30 s to the first token, 100 ms between tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--prefill", type=int, nargs="*", help="only these numbers of prefill workers")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--pulls", action="store_true", help="prefill workers fetch prefixes")
    parser.add_argument("--svg", type=Path)
    settings = parser.parse_args()
    trace = compressed(read_trace(TRACE), speed=settings.speed, limit=settings.limit)
    speeds = profile(PROFILE)
    worker = WorkerSpec(
        num_pages=settings.kv_tokens // trace.block_tokens,
        page_size=trace.block_tokens,
        law=speeds.law,
        link=LinkSpeed(0.002, 25e9),
        kv_bytes_per_token=speeds.kv_bytes_per_token,
        chunk_tokens=8192,
        max_batch=256,
    )
    rows, num_tokens, spent_s = [], 0, 0.0
    print(f"{'P:D':>6} {'TTFT mean':>10} {'P99':>8} {'TPOT P99':>9} {'both kept':>9} {'goodput':>8} {'refused':>8}")
    for num_prefill in settings.prefill or range(1, settings.workers):
        spec = ClusterSpec(
            num_prefill=num_prefill,
            num_decode=settings.workers - num_prefill,
            prefill=worker,
            decode=worker,
            max_sequence_tokens=262_144,
            max_waiting=100_000,
            # No decode worker computes a prompt: the roles are to be seen apart.
            routing=RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0)),
            pulls_prefixes=settings.pulls,
        )
        began_s = time.process_time()
        run = simulate(trace, spec, "hybrid")
        spent_s += time.process_time() - began_s
        num_tokens += sum(job.num_output_tokens for job in run.jobs if job.end_s is not None)
        one = summary(run, TARGETS)
        rows.append((num_prefill, one))
        ttft, tpot = one["ttft_s"], one["tpot_s"]
        print(
            f"{num_prefill:>3}:{settings.workers - num_prefill:<2} {ttft['mean']:>9.2f}s {ttft['p99']:>7.1f}s "
            f"{1e3 * (tpot['p99'] or math.nan):>7.1f}ms {one['slo']['met_both']:>9.3f} {one['goodput_per_s']:>6.2f}/s "
            f"{sum(one['requests']['refused'].values()):>8}",
            flush=True,
        )
    print(f"{num_tokens} answer tokens in {spent_s:.1f} s of one core: {num_tokens / spent_s:,.0f} tokens/s")
    if settings.svg is not None:
        kept = Curve("both limits kept", [(p, one["slo"]["met_both"]) for p, one in rows])
        first = Curve("TTFT limit kept", [(p, one["slo"]["met_ttft"]) for p, one in rows])
        settings.svg.write_text(svg_file([Chart("Limits kept by P:D", "prefill workers", "requests", [kept, first])]))


if __name__ == "__main__":
    main()
