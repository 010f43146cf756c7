"""Planners: OpGraph x Profile x Cluster -> Plan. One strategy per file, one cost and memory model."""
