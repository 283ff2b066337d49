"""Chat with the model and tools of a run: `jaxrl chat RUN`."""
