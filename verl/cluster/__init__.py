"""Starts a run's Ray cluster and handles its machines, network and failures."""
