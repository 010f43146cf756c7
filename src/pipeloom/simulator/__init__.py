"""Simulator: Program x costs x Cluster -> the Timeline that the runtime should measure."""
