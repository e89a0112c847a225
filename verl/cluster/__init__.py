"""Ray cluster of a run: startup, machines, network and failures."""
