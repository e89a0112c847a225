"""Controls groups of workers on the cluster: their roles, response generation and supervision."""
