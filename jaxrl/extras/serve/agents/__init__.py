"""Episodes that clients play through the endpoint, with a training run that learns from them."""
