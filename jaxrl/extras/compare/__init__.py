"""Two objectives on one batch: `jaxrl compare RUN --step=N --with.loss.name=cispo`.

What each of them would do with the trajectories of a step is seen before a run is spent on it.
"""
