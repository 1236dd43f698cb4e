"""Predicted price of an hour, a step, tokens and a run."""

from moe.spec.base import Frozen, NonNegative

_HOUR_S = 3600
_MILLION = 10**6


class MoneyEstimate(Frozen):
    """Predicted price, in the currency of `price_per_hour`."""

    per_hour: NonNegative
    """Price of all billed devices."""
    per_step: NonNegative
    per_million_tokens: NonNegative
    """Positions, padding included; of a module, rows."""
    run: NonNegative | None = None
    """None if the number of steps is unknown."""


def estimate_money(
    price_per_hour: float | None, *, billed_devices: int, step_s: float, tokens_per_step: int, num_steps: int | None
) -> MoneyEstimate | None:
    """Price of `billed_devices` at `price_per_hour` each; None if that is unknown."""
    if price_per_hour is None:
        return None
    per_hour = price_per_hour * billed_devices
    per_step = per_hour * step_s / _HOUR_S
    return MoneyEstimate(
        per_hour=_round_amount(per_hour),
        per_step=_round_amount(per_step),
        per_million_tokens=_round_amount(per_step * _MILLION / tokens_per_step),
        run=None if num_steps is None else _round_amount(per_step * num_steps),
    )


def format_amount(money: float) -> str:
    """Format an amount: `5,900`, `12.30`, `0.41`, `0.0031`."""
    if money >= 1000:
        return f"{money:,.0f}"
    return f"{money:.2f}" if money >= 0.1 else f"{money:.2g}"


def _round_amount(money: float) -> float:
    return float(f"{money:.6g}")
