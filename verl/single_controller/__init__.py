"""Ray: the cluster, groups of workers and their supervision."""
