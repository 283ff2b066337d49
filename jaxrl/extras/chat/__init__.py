"""Chat with a run's model and tools: `jaxrl chat RUN`."""
