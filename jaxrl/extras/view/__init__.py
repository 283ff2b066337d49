"""Web page about runs: served live by `jaxrl view`, written to one file by `jaxrl report`.

`reader` and `trajectories` read a workdir. `facts`, `responses` and `tokens` compute the contents.
`viewer` answers requests of the page (`page.js`). `server` serves the page, `report` embeds it.
"""
