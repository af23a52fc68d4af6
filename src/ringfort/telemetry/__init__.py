"""Metrics of a running group, and the count of its training steps."""

from __future__ import annotations

from ringfort.telemetry.metrics import DistributedMetrics, Histogram, MetricsSnapshot, OperationSnapshot

__all__ = ["DistributedMetrics", "Histogram", "MetricsSnapshot", "OperationSnapshot"]
