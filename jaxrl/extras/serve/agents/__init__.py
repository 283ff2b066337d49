"""Training on episodes that external agents play through the endpoint."""
