"""Worker groups on the cluster: roles, generation and supervision."""
