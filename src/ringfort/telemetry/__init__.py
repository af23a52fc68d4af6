"""What a running group can tell about itself: metrics, and later traces and events."""

from __future__ import annotations

from ringfort.telemetry.metrics import DistributedMetrics, Histogram, MetricsSnapshot, OperationSnapshot

__all__ = ["DistributedMetrics", "Histogram", "MetricsSnapshot", "OperationSnapshot"]
