"""The suite of algorithms over the memory store."""

from tests.l7.algorithms import TestExamples, TestLeases, TestPromises

__all__ = ["TestExamples", "TestLeases", "TestPromises"]
