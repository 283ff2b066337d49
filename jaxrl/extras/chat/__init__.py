"""The model of a run in use, with the run's tools: `jaxrl chat RUN`."""
