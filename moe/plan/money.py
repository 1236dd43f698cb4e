"""Predicted price of a step, of an hour, of tokens and of a run, where a cluster has a price."""

from moe.spec.base import Frozen, NonNegative

_HOUR_S = 3600
_MILLION = 10**6


class MoneyEstimate(Frozen):
    """Predicted price, in the currency that the cluster's `price_per_hour` counts in."""

    per_hour: NonNegative
    """Price of the devices of all nodes that have workers, whatever they do."""
    per_step: NonNegative
    per_million_tokens: NonNegative
    """Price of positions of a step, padding included, as the plan counts them; of a module, of rows."""
    run: NonNegative | None = None
    """Price of all steps that the job takes; None where their number is not known."""


def money_of(
    price_per_hour: float | None,
    *,
    billed_devices: int,
    step_s: float,
    tokens_per_step: int,
    num_steps: int | None,
) -> MoneyEstimate | None:
    """The price of so many devices, at `price_per_hour` of one; None where that is not known."""
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


def amount_of(money: float) -> str:
    """`5,900`, `12.30`, `0.41`, `0.0031`."""
    if money >= 1000:
        return f"{money:,.0f}"
    return f"{money:.2f}" if money >= 0.1 else f"{money:.2g}"


def _round_amount(money: float) -> float:
    """The amount in six digits, as times are."""
    return float(f"{money:.6g}")
