"""For programs that call APIs which limit rates: transports for httpx that wait, try again, and keep to budgets."""

from netlimit.client.budget import Budget
from netlimit.client.errors import BudgetExhausted, Exhausted, QuotaExhausted
from netlimit.client.retry import Retry
from netlimit.client.transport import AsyncTransport, Transport

__all__ = ["AsyncTransport", "Budget", "BudgetExhausted", "Exhausted", "QuotaExhausted", "Retry", "Transport"]
