"""The Ray cluster of a run: its start, its machines and network, and how they fail."""
