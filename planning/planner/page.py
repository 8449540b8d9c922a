"""A plan in words, as JSON and as one HTML file."""

import html
from dataclasses import asdict
from typing import Any

from planning.planner.question import Question
from planning.planner.search import Answer, Outcome, Plan
from planning.simulator.html_report import STYLE, Curve, chart

HOURS_PER_MILLION = 1e6 / 3600


def facts(question: Question, found: Answer) -> dict[str, Any]:
    """Returns everything that is known of an answer, as plain data."""
    workload = question.workload
    return {
        "workload": {
            "rate_per_s": workload.rate_per_s,
            "mean_prompt_tokens": workload.mean_prompt,
            "mean_answer_tokens": workload.mean_answer,
        },
        "targets": asdict(question.targets),
        "kinds": [kind.name for kind in question.kinds],
        "separate": None if found.best is None else _plan(question, found.best),
        "one_pool": None if found.one_pool is None else _plan(question, found.one_pool),
        "infeasible": None if found.bound is None else asdict(found.bound),
        "advice": _advice(found),
    }


def text(answer: dict[str, Any]) -> str:
    """Returns an answer in a few lines."""
    lines = [answer["advice"]]
    for name, title in (("separate", "separate roles"), ("one_pool", "one pool")):
        plan = answer[name]
        if plan is None:
            continue
        shape = plan["workers"]
        lines += [
            f"{title}: {shape['prefill']} prefill on {shape['prefill_kind']}, {shape['decode']} decode on "
            f"{shape['decode_kind']}; {plan['gpus']} GPUs, ${plan['price_per_h']:,.2f}/h, {plan['kilowatts']:.1f} kW, "
            f"${plan['price_per_million_tokens']:.3f} per million answer tokens",
            "  "
            + "  ".join(
                f"{row['name'].upper()} {1e3 * row['low_s']:.0f} to {1e3 * row['high_s']:.0f} ms"
                for row in plan["seen"]
            )
            + f" at P{100 * answer['targets']['percentile']:g}; {plan['law_errors']}",
            "  more load: " + ", ".join(f"{load} x {_or_holds(missed)}" for load, missed in plan["growth"].items()),
            "  one lost: " + ", ".join(f"{role} {_or_holds(missed)}" for role, missed in plan["lost"].items()),
        ]
    return "\n".join(lines) + "\n"


def page(answer: dict[str, Any]) -> str:
    """Returns the report: the words, and how the targets fare as load grows."""
    parts = [f"<h1>Plan</h1><pre>{html.escape(text(answer))}</pre>"]
    for name, title in (("separate", "Separate roles"), ("one_pool", "One pool")):
        plan = answer[name]
        if plan is None:
            continue
        loads = {"1": {row["name"]: row["high_s"] for row in plan["seen"]}, **plan["growth_seen"]}
        curves = [
            Curve(key.upper(), [(float(load), seen[key]) for load, seen in loads.items()])
            for key in ("ttft", "tpot", "e2e")
        ]
        drawn = [chart(one.name, "load, times the workload's", "seconds", [one]) for one in curves]
        parts.append(f"<h2>{title}</h2>{''.join(drawn)}")
    rows = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in {**answer["workload"], **answer["targets"]}.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan</title>'
        f"<style>{STYLE}</style></head><body>\n{''.join(parts)}<table>{rows}</table>\n</body></html>\n"
    )


def _plan(question: Question, plan: Plan) -> dict[str, Any]:
    shape, workload = plan.shape, question.workload
    tokens_per_s = workload.rate_per_s * workload.mean_answer
    errors = {error for kind in (shape.prefill, shape.decode) for error in kind.profile.errors}
    return {
        "workers": {
            "prefill": shape.num_prefill,
            "prefill_kind": shape.prefill.name,
            "decode": shape.num_decode,
            "decode_kind": shape.decode.name,
        },
        "gpus": shape.num_gpus,
        "price_per_h": shape.price_per_h,
        "kilowatts": shape.watts / 1e3,
        "price_per_million_tokens": shape.price_per_h * HOURS_PER_MILLION / tokens_per_s,
        "seen": [
            {
                "name": name,
                "low_s": min(getattr(one, f"{name}_s") for one in plan.outcomes),
                "high_s": max(getattr(one, f"{name}_s") for one in plan.outcomes),
            }
            for name in ("ttft", "tpot", "e2e")
        ],
        "busy": {"prefill": plan.outcomes[0].busy_prefill, "decode": plan.outcomes[0].busy_decode},
        "law_errors": "step times: " + ("; ".join(sorted(errors)) or "no errors known"),
        "growth": {str(load): one.missed(question.targets) for load, one in plan.growth.items()},
        "growth_seen": {str(load): _seconds(one) for load, one in plan.growth.items()},
        "lost": plan.lost,
    }


def _seconds(outcome: Outcome) -> dict[str, float]:
    return {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}


def _or_holds(missed: list[str]) -> str:
    return f"misses {', '.join(missed)}" if missed else "holds"


def _advice(found: Answer) -> str:
    if found.bound is not None:
        bound = found.bound
        nearest = f"; nearest feasible: {bound.nearest_s:.4g} instead of {bound.target_s:g}" if bound.nearest_s else ""
        return f"Infeasible. {bound.constraint}{nearest}."
    if found.best is None or found.one_pool is None:
        return "One pool keeps the targets, separate roles do not." if found.best is None else "Separate roles."
    apart, together = found.best.shape, found.one_pool.shape
    if together.price_per_h <= apart.price_per_h:
        return f"One pool is cheaper: {together.num_gpus} GPUs instead of {apart.num_gpus}."
    return f"Separate roles are cheaper: {apart.num_gpus} GPUs instead of {together.num_gpus}."
