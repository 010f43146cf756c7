"""Schedules: (stage graph, placement, micro-batches) -> the order in which each rank computes."""
