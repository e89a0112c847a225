"""Groups of workers on the cluster: roles, generation, supervision."""
