"""Train on episodes of external agents that use the endpoint."""
